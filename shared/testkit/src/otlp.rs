//! A trace collector that keeps what it receives (OTLP over gRPC).

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::eventually;

/// A span that arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The name of the operation.
    pub name: String,
    /// The resource's `service.name`.
    pub service: String,
    /// 32 hexadecimal digits.
    pub trace_id: String,
    /// 16 hexadecimal digits.
    pub span_id: String,
    /// 16 hexadecimal digits; empty for the first span of a trace.
    pub parent_id: String,
    /// Nanoseconds since 1970-01-01 UTC.
    pub start_unix_nanos: u64,
    /// Nanoseconds since 1970-01-01 UTC.
    pub end_unix_nanos: u64,
    /// Attributes whose values are strings, in the order of arrival.
    pub attributes: Vec<(String, String)>,
}

type Spans = Arc<Mutex<Vec<Span>>>;

/// A collector on a free port of loopback, ended when dropped.
#[derive(Debug)]
pub struct TraceCollector {
    address: SocketAddr,
    spans: Spans,
    server: JoinHandle<()>,
}

struct Service {
    spans: Spans,
}

impl TraceCollector {
    /// Starts a collector.
    pub async fn start() -> anyhow::Result<Self> {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("no free port on loopback")?;
        let address = listener.local_addr()?;
        let spans = Spans::default();
        let service = TraceServiceServer::new(Service { spans: spans.clone() });
        let server = tonic::transport::Server::builder().add_service(service);
        let serving = server.serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(async {
            if let Err(error) = serving.await {
                eprintln!("the trace collector ended: {error}");
            }
        });
        Ok(Self { address, spans, server })
    }

    /// `http://127.0.0.1:<port>`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Every span that has arrived so far.
    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the spans that have arrived satisfy `done`, and returns them; an error lists them.
    pub async fn wait_for(
        &self,
        limit: Duration,
        what: &str,
        done: impl Fn(&[Span]) -> bool,
    ) -> anyhow::Result<Vec<Span>> {
        let waited = eventually(limit, what, || std::future::ready(done(&self.spans()))).await;
        waited.with_context(|| {
            let list: Vec<String> =
                self.spans().iter().map(|s| format!("{}/{}", s.service, s.name)).collect();
            format!("the spans that arrived: {}", list.join(", "))
        })?;
        Ok(self.spans())
    }
}

impl Drop for TraceCollector {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[tonic::async_trait]
impl TraceService for Service {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let spans = flatten(request.into_inner());
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).extend(spans);
        Ok(Response::new(ExportTraceServiceResponse { partial_success: None }))
    }
}

fn flatten(request: ExportTraceServiceRequest) -> Vec<Span> {
    let mut found = Vec::new();
    for group in request.resource_spans {
        let resource = strings(group.resource.unwrap_or_default().attributes);
        let service = resource.into_iter().find(|(key, _)| key == "service.name").unwrap_or_default().1;
        for span in group.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            found.push(Span {
                name: span.name,
                service: service.clone(),
                trace_id: hex(&span.trace_id),
                span_id: hex(&span.span_id),
                parent_id: hex(&span.parent_span_id),
                start_unix_nanos: span.start_time_unix_nano,
                end_unix_nanos: span.end_time_unix_nano,
                attributes: strings(span.attributes),
            });
        }
    }
    found
}

fn strings(attributes: Vec<KeyValue>) -> Vec<(String, String)> {
    attributes
        .into_iter()
        .filter_map(|attribute| match attribute.value?.value? {
            Value::StringValue(text) => Some((attribute.key, text)),
            _ => None,
        })
        .collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
    use opentelemetry_proto::tonic::common::v1::AnyValue;
    use opentelemetry_proto::tonic::resource::v1::Resource;
    use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span as WireSpan};

    use super::*;

    #[tokio::test]
    async fn a_span_arrives_with_its_service_and_ids() {
        let collector = TraceCollector::start().await.unwrap();
        let name = AnyValue { value: Some(Value::StringValue("pod-sync".into())) };
        let attribute = KeyValue { key: "service.name".into(), value: Some(name), ..KeyValue::default() };
        let span = WireSpan {
            name: "start pod".into(),
            trace_id: vec![0xab; 16],
            span_id: vec![1; 8],
            ..WireSpan::default()
        };
        let request = ExportTraceServiceRequest {
            resource_spans: vec![ResourceSpans {
                resource: Some(Resource { attributes: vec![attribute], ..Resource::default() }),
                scope_spans: vec![ScopeSpans { spans: vec![span], ..ScopeSpans::default() }],
                ..ResourceSpans::default()
            }],
        };
        let mut client = TraceServiceClient::connect(collector.endpoint()).await.unwrap();
        client.export(request).await.unwrap();
        let limit = Duration::from_secs(10);
        let spans = collector.wait_for(limit, "a span arrives", |spans| !spans.is_empty()).await.unwrap();
        assert_eq!(spans[0].service, "pod-sync");
        assert_eq!(spans[0].trace_id, "ab".repeat(16));
        assert_eq!(spans[0].parent_id, "");
    }
}
