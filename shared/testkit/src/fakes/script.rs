//! How a method is answered: the queued answers first, then the standing one.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tonic::Status;

use super::gate::{Gate, GateWaiter};
use super::recorder::Recorder;

type AnswerFuture<Answer> = Pin<Box<dyn Future<Output = Result<Answer, Status>> + Send>>;
type Handler<Request, Answer> = Arc<dyn Fn(Request) -> AnswerFuture<Answer> + Send + Sync>;

/// The script of a method with one request per call.
pub(super) struct Script<Request, Answer> {
    method: &'static str,
    requests: Recorder<Request>,
    answered: Recorder<Request>,
    state: Mutex<State<Request, Answer>>,
}

struct State<Request, Answer> {
    queued: VecDeque<Result<Answer, Status>>,
    standing: Option<Handler<Request, Answer>>,
    gate: GateWaiter,
}

/// The error of a method without an answer.
pub(super) fn not_scripted(method: &str) -> Status {
    Status::unimplemented(format!("the test has set no answer for {method}"))
}

impl<Request, Answer> Script<Request, Answer> {
    pub(super) fn new(method: &'static str) -> Self {
        let state = State { queued: VecDeque::new(), standing: None, gate: GateWaiter::default() };
        Self {
            method,
            requests: Recorder::default(),
            answered: Recorder::default(),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<Request, Answer>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn method(&self) -> &'static str {
        self.method
    }

    pub(super) fn requests(&self) -> &Recorder<Request> {
        &self.requests
    }

    pub(super) fn answered(&self) -> &Recorder<Request> {
        &self.answered
    }

    /// Answers one later call; queued answers are used in order, before the standing one.
    pub(super) fn queue(&self, answer: Result<Answer, Status>) {
        self.lock().queued.push_back(answer);
    }

    /// Closes a gate for later calls; it replaces the previous gate.
    pub(super) fn hold(&self) -> Gate {
        let (gate, waiter) = Gate::closed();
        self.lock().gate = waiter;
        gate
    }

    /// Sets the standing answer.
    pub(super) fn answer_async<F>(&self, handler: impl Fn(Request) -> F + Send + Sync + 'static)
    where
        F: Future<Output = Result<Answer, Status>> + Send + 'static,
    {
        self.lock().standing = Some(Arc::new(move |request| Box::pin(handler(request))));
    }
}

impl<Request: Clone, Answer: Send + 'static> Script<Request, Answer> {
    /// Sets the standing answer.
    pub(super) fn answer_with(
        &self,
        handler: impl Fn(Request) -> Result<Answer, Status> + Send + Sync + 'static,
    ) {
        self.answer_async(move |request| std::future::ready(handler(request)));
    }

    /// Records the request, waits at the gate, and answers.
    pub(super) async fn call(&self, request: Request) -> Result<Answer, Status> {
        self.requests.record(request.clone());
        let answer = self.answer_to(request.clone()).await;
        self.answered.record(request);
        answer
    }

    async fn answer_to(&self, request: Request) -> Result<Answer, Status> {
        let gate = self.lock().gate.clone();
        gate.pass().await;
        let standing = {
            let mut state = self.lock();
            if let Some(queued) = state.queued.pop_front() {
                return queued;
            }
            state.standing.clone()
        };
        // Without the lock: a standing answer may change the script of its own method.
        let standing = standing.ok_or_else(|| not_scripted(self.method))?;
        standing(request).await
    }
}
