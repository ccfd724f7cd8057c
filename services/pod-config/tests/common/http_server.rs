//! An HTTP server on its own threads, so that a test may block.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::TIMEOUT;

/// A received request.
#[derive(Debug, Clone)]
pub struct HttpRequest {
    pub path: String,
    pub headers: Vec<(String, String)>,
}

impl HttpRequest {
    /// All values of a header; `name` is in lower case.
    pub fn header(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(n, _)| n == name).map(|(_, value)| value.as_str()).collect()
    }
}

/// The response for each path; `None` closes the connection.
type Responses = Arc<Mutex<BTreeMap<String, Option<Vec<u8>>>>>;

/// A server on loopback that runs as long as the test.
pub struct HttpServer {
    pub url: String,
    responses: Responses,
    requests: Receiver<HttpRequest>,
}

impl HttpServer {
    pub fn start() -> Self {
        Self::start_server(None)
    }

    pub fn with_tls(tls: ServerConfig) -> Self {
        Self::start_server(Some(Arc::new(tls)))
    }

    fn start_server(tls: Option<Arc<ServerConfig>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://localhost:{}", listener.local_addr().unwrap().port());
        let responses = Responses::default();
        let (sender, requests) = channel();
        let shared = Arc::clone(&responses);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (tls, shared, sender) = (tls.clone(), Arc::clone(&shared), sender.clone());
                thread::spawn(move || match tls {
                    None => serve(stream, &shared, &sender),
                    Some(tls) => serve(tls_stream(tls, stream), &shared, &sender),
                });
            }
        });
        Self { url, responses, requests }
    }

    /// Sets the response for `path`.
    pub fn respond(&self, path: &str, head: &str, body: &str) {
        let text =
            format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        self.responses.lock().unwrap().insert(path.to_owned(), Some(text.into_bytes()));
    }

    /// Serves a manifest at `/`.
    pub fn serve_manifest(&self, manifest: &str) {
        self.respond("/", "200 OK", manifest);
    }

    /// Closes connections for `/` without a response.
    pub fn close_connections(&self) {
        self.responses.lock().unwrap().insert("/".to_owned(), None);
    }

    /// Waits for the next request.
    pub fn next(&self) -> HttpRequest {
        self.requests.recv_timeout(TIMEOUT).expect("a request is received in time")
    }

    /// Waits for this many new requests; all but the last of them have been answered by then.
    pub fn wait_for_requests(&self, times: usize) {
        while self.requests.try_recv().is_ok() {}
        (0..times).for_each(|_| drop(self.next()));
    }
}

fn tls_stream(tls: Arc<ServerConfig>, stream: TcpStream) -> StreamOwned<ServerConnection, TcpStream> {
    StreamOwned::new(ServerConnection::new(tls).unwrap(), stream)
}

/// Reads a request and answers it. Ends early if the client is gone.
fn serve(mut stream: impl Read + Write, responses: &Responses, requests: &Sender<HttpRequest>) {
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
    let response = responses.lock().unwrap().get(&path).cloned().flatten();
    let _ = requests.send(HttpRequest { path, headers });
    if let Some(response) = response {
        let _ = stream.write_all(&response);
        let _ = stream.flush();
    }
}
