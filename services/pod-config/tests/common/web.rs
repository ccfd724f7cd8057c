//! A server of HTTP on threads of its own, so that a test may wait without it.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::PATIENCE;

/// A request as it came.
#[derive(Debug, Clone)]
pub struct Asked {
    pub path: String,
    pub headers: Vec<(String, String)>,
}

impl Asked {
    /// Every value of a header, whose name is in lower case.
    pub fn header(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(n, _)| n == name).map(|(_, value)| value.as_str()).collect()
    }
}

/// What is said at each path; `None`: the connection is closed.
type Answers = Arc<Mutex<BTreeMap<String, Option<Vec<u8>>>>>;

/// A server on loopback, for as long as the test runs.
pub struct Web {
    pub url: String,
    answers: Answers,
    asked: Receiver<Asked>,
}

impl Web {
    pub fn start() -> Self {
        Self::serve(None)
    }

    pub fn with_tls(tls: ServerConfig) -> Self {
        Self::serve(Some(Arc::new(tls)))
    }

    fn serve(tls: Option<Arc<ServerConfig>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://localhost:{}", listener.local_addr().unwrap().port());
        let answers = Answers::default();
        let (sender, asked) = channel();
        let said = Arc::clone(&answers);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (tls, said, sender) = (tls.clone(), Arc::clone(&said), sender.clone());
                thread::spawn(move || match tls {
                    None => answer(stream, &said, &sender),
                    Some(tls) => answer(over(tls, stream), &said, &sender),
                });
            }
        });
        Self { url, answers, asked }
    }

    /// From now on the whole of this answer is given at `path`.
    pub fn say(&self, path: &str, head: &str, body: &str) {
        let text =
            format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        self.answers.lock().unwrap().insert(path.to_owned(), Some(text.into_bytes()));
    }

    /// From now on a manifest stands at `/`.
    pub fn has(&self, manifest: &str) {
        self.say("/", "200 OK", manifest);
    }

    /// From now on nobody is answered at `/`.
    pub fn hangs_up(&self) {
        self.answers.lock().unwrap().insert("/".to_owned(), None);
    }

    /// The next request that was not waited for yet.
    pub fn next(&self) -> Asked {
        self.asked.recv_timeout(PATIENCE).expect("it is asked in time")
    }

    /// Waits until it has been asked so often from now on; all but the last of them have been answered by then.
    pub fn is_asked(&self, times: usize) {
        while self.asked.try_recv().is_ok() {}
        (0..times).for_each(|_| drop(self.next()));
    }
}

fn over(tls: Arc<ServerConfig>, stream: TcpStream) -> StreamOwned<ServerConnection, TcpStream> {
    StreamOwned::new(ServerConnection::new(tls).unwrap(), stream)
}

/// Reads a request and answers it. It ends early when the other side goes away.
fn answer(mut stream: impl Read + Write, answers: &Answers, asked: &Sender<Asked>) {
    let mut text = Vec::new();
    while !text.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(1) => text.push(byte[0]),
            _ => return,
        }
    }
    let text = String::from_utf8(text).unwrap();
    let mut lines = text.lines();
    let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
    let header = |line: &str| {
        let (name, value) = line.split_once(": ")?;
        Some((name.to_ascii_lowercase(), value.to_owned()))
    };
    let headers = lines.filter_map(header).collect();
    let said = answers.lock().unwrap().get(&path).cloned().flatten();
    let _ = asked.send(Asked { path, headers });
    if let Some(said) = said {
        let _ = stream.write_all(&said);
        let _ = stream.flush();
    }
}
