//! Requests to small servers on loopback that send the responses of a test and record the requests.

use std::sync::{Arc, Mutex};

use rustls::SupportedProtocolVersion;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::version::{TLS12, TLS13};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(20);

/// Answers each request in turn with the next of these texts, then closes.
struct Server {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// With a certificate that ended long ago and is of another host.
fn acceptor(version: &'static SupportedProtocolVersion) -> TlsAcceptor {
    let mut params = rcgen::CertificateParams::new(vec!["elsewhere.example".to_owned()]).unwrap();
    params.not_after = rcgen::date_time_ymd(1990, 1, 1);
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = params.self_signed(&key).unwrap().der().clone();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], PrivatePkcs8KeyDer::from(key.serialize_der()).into())
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

/// Reads a request, answers it and closes the connection without a TLS close.
async fn serve(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), answer: &str) -> String {
    let (mut text, mut buffer) = (String::new(), [0; 4096]);
    while !text.ends_with("\r\n\r\n") {
        match stream.read(&mut buffer).await.unwrap() {
            0 => break,
            n => text.push_str(std::str::from_utf8(&buffer[..n]).unwrap()),
        }
    }
    // The client closes the connection when it has read enough.
    let _ = stream.write_all(answer.as_bytes()).await;
    let _ = stream.flush().await;
    text
}

impl Server {
    async fn new(answers: &[&str]) -> Self {
        Self::with(answers, None).await
    }

    /// Each request is recorded with the server name of the TLS handshake.
    async fn over_tls(answers: &[&str], version: &'static SupportedProtocolVersion) -> Self {
        Self::with(answers, Some(acceptor(version))).await
    }

    async fn with(answers: &[&str], tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let answers: Vec<String> = answers.iter().map(|a| a.replace("PORT", &port.to_string())).collect();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&asked);
        let task = tokio::spawn(async move {
            for answer in answers.iter().cycle() {
                let (mut stream, _) = listener.accept().await.unwrap();
                let text = match &tls {
                    None => serve(&mut stream, answer).await,
                    Some(tls) => {
                        let mut stream = tls.accept(stream).await.unwrap();
                        let name = stream.get_ref().1.server_name().map(ToOwned::to_owned);
                        let text = serve(&mut stream, answer).await;
                        format!("{} {text}", name.unwrap_or_default())
                    }
                };
                heard.lock().unwrap().push(text);
            }
        });
        Self { port, asked, task }
    }

    async fn get(&self, path: &str, headers: &[(&str, &str)]) -> Result<Answer, String> {
        self.get_as("127.0.0.1", false, path, headers).await.map_err(|failed| failed.text)
    }

    async fn get_as(
        &self,
        host: &str,
        tls: bool,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Result<Answer, HttpError> {
        let headers: Vec<HttpHeader> = headers
            .iter()
            .map(|(name, value)| HttpHeader { name: (*name).into(), value: (*value).into() })
            .collect();
        let request =
            Get { tls, host, port: self.port, path, headers: &headers, user_agent: "kube-probe/1.36" };
        get(&request, LONG).await
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    /// The first line of each request.
    fn lines(&self) -> Vec<String> {
        self.asked().iter().map(|a| a.lines().next().unwrap_or_default().to_owned()).collect()
    }
}

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine";

#[tokio::test]
async fn http_get_sends_user_agent_and_host_and_closes_the_connection() {
    let server = Server::new(&[OK]).await;
    let answer = server.get("/healthz?full=1#top", &[]).await.unwrap();
    assert_eq!((answer.status, answer.body.as_str()), (200, "fine"));
    let asked = server.asked().remove(0);
    assert!(asked.starts_with("GET /healthz?full=1 HTTP/1.1\r\n"), "{asked}");
    let mut lines: Vec<&str> = asked.trim_end().lines().skip(1).collect();
    lines.sort_unstable();
    let host = format!("Host: 127.0.0.1:{}", server.port);
    assert_eq!(lines, ["Accept: */*", "Connection: close", &host, "User-Agent: kube-probe/1.36"]);
}

#[tokio::test]
async fn manifest_headers_override_defaults_and_empty_ones_remove_them() {
    let server = Server::new(&[OK]).await;
    let headers = [("host", "web.example"), ("accept", ""), ("X-A", "1"), ("x-a", "2"), ("User-Agent", "me")];
    server.get("", &headers).await.unwrap();
    let asked = server.asked().remove(0);
    let mut lines: Vec<&str> = asked.trim_end().lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        ["Connection: close", "GET / HTTP/1.1", "Host: web.example", "User-Agent: me", "X-A: 1", "X-A: 2"]
    );
    let refused = server.get("/", &[("bad name", "x")]).await.unwrap_err();
    assert!(refused.contains("\"bad name\" cannot be the name of a header"), "{refused}");
}

#[tokio::test]
async fn same_host_redirects_are_followed_and_relative_ones_keep_the_host_header() {
    let server = Server::new(&[
        "HTTP/1.1 302 Found\r\nLocation: next/../b?x=1\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 308 Permanent Redirect\r\nLocation: http://127.0.0.1:PORT/c\r\nContent-Length: 0\r\n\r\n",
        OK,
    ])
    .await;
    let answer = server.get("/dir/a", &[("Host", "web.example")]).await.unwrap();
    assert_eq!(answer.status, 200);
    assert_eq!(server.lines(), ["GET /dir/a HTTP/1.1", "GET /dir/b?x=1 HTTP/1.1", "GET /c HTTP/1.1"]);
    let own: Vec<bool> = server.asked().iter().map(|a| a.contains("Host: web.example")).collect();
    assert_eq!(own, [true, true, false]);
}

#[tokio::test]
async fn a_redirect_to_another_host_is_the_response_and_loops_end() {
    let redirect =
        "HTTP/1.1 302 Found\r\nLocation: http://elsewhere.example/\r\nContent-Length: 3\r\n\r\ngo!";
    let server = Server::new(&[redirect]).await;
    let answer = server.get("/", &[]).await.unwrap();
    assert_eq!((answer.status, answer.body.as_str()), (302, "go!"));
    assert_eq!(server.asked().len(), 1);

    let server = Server::new(&["HTTP/1.1 307 Again\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"]).await;
    let text = server.get("/", &[]).await.unwrap_err();
    assert!(text.ends_with("stopped after 10 redirects"), "{text}");
    assert_eq!(server.asked().len(), 11);

    let server =
        Server::new(&["HTTP/1.1 301 Moved\r\nLocation: ftp://127.0.0.1/\r\nContent-Length: 0\r\n\r\n"]).await;
    let text = server.get("/", &[]).await.unwrap_err();
    assert!(text.contains("neither http nor https"), "{text}");
}

#[tokio::test]
async fn tls_accepts_any_certificate_and_a_close_without_notify() {
    for version in [&TLS12, &TLS13] {
        for answer in [OK, "HTTP/1.1 200 OK\r\n\r\nfine"] {
            let server = Server::over_tls(&[answer], version).await;
            for (host, server_name) in [("localhost", "localhost"), ("127.0.0.1", "")] {
                let answer = server.get_as(host, true, "/x", &[]).await.unwrap();
                assert_eq!((answer.status, answer.body.as_str()), (200, "fine"));
                let asked = server.asked().pop().unwrap();
                assert!(asked.starts_with(&format!("{server_name} GET /x HTTP/1.1\r\n")), "{asked}");
                assert!(asked.contains(&format!("\r\nHost: {host}:{}\r\n", server.port)), "{asked}");
            }
        }
    }
    // But a response shorter than its Content-Length is an error.
    let short = Server::over_tls(&["HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfine"], &TLS13).await;
    short.get_as("127.0.0.1", true, "/", &[]).await.unwrap_err();
}

#[tokio::test]
async fn redirects_between_http_and_https_are_followed() {
    let last = Server::new(&[OK]).await;
    let moved = |scheme: &str, port: u16, path: &str| {
        format!(
            "HTTP/1.1 302 Found\r\nLocation: {scheme}//127.0.0.1:{port}{path}\r\nContent-Length: 0\r\n\r\n"
        )
    };
    let second = moved("http:", last.port, "/last");
    let tls =
        Server::over_tls(&[&moved("", 0, "").replace("//127.0.0.1:0", "/again"), &second], &TLS13).await;
    let first = Server::new(&[&moved("https:", tls.port, "/tls")]).await;
    assert_eq!(first.get("/", &[]).await.unwrap().status, 200);
    assert_eq!(tls.lines(), [" GET /tls HTTP/1.1", " GET /again HTTP/1.1"]);
    assert_eq!(last.lines(), ["GET /last HTTP/1.1"]);
}

#[tokio::test]
async fn a_server_without_tls_is_distinguished_from_a_silent_one() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let request = Get { tls: true, host: "127.0.0.1", port, path: "/x", headers: &[], user_agent: "t" };
    let silent = get(&request, SECOND).await.unwrap_err();
    assert_eq!(silent.text, format!("Get \"https://127.0.0.1:{port}/x\": no answer within 1 s"));
    for (answer, plain, said) in [
        ("HTTP/1.0 400 Bad Request\r\n\r\n", true, "the server speaks HTTP without TLS"),
        ("SSH-2.0-none\r\n", false, "no TLS with the server: "),
        ("", false, "no TLS with the server: "),
    ] {
        // A server of its own: the unanswered connection still waits at the other.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let request = Get { port: listener.local_addr().unwrap().port(), ..request.clone() };
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(answer.as_bytes()).await;
        };
        let (failed, ()) = tokio::join!(get(&request, LONG), server);
        let failed = failed.unwrap_err();
        assert_eq!(failed.plain, plain, "{failed:?}");
        assert!(failed.text.contains(said), "{failed:?}");
    }
}

#[tokio::test]
async fn at_most_10_kib_of_a_body_are_read() {
    let endless = format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(64 << 10));
    let server = Server::new(&[&endless]).await;
    assert_eq!(server.get("/", &[]).await.unwrap().body.len(), BODY_LIMIT);
}

#[tokio::test]
async fn errors_of_unreachable_and_silent_servers_name_the_url() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let request = Get { tls: false, host: "127.0.0.1", port, path: "/x", headers: &[], user_agent: "t" };
    // Its backlog accepts connections that are never answered.
    let text = get(&request, SECOND).await.unwrap_err().text;
    assert_eq!(text, format!("Get \"http://127.0.0.1:{port}/x\": no answer within 1 s"));
    drop(listener);
    let text = get(&request, LONG).await.unwrap_err().text;
    assert!(text.contains("cannot connect") && text.contains("refused"), "{text}");
    let server = Server::new(&["SSH-2.0-none\r\n"]).await;
    server.get("/", &[]).await.unwrap_err();
}

#[test]
fn relative_references_are_resolved_as_in_rfc_3986() {
    for (base, reference, joins) in [
        ("/a/b?q", "c", "/a/c"),
        ("/a/b?q", "?x", "/a/b?x"),
        ("/a/b", "/c?x=/../", "/c?x=/../"),
        ("/a/b/c", "../d/./e", "/a/d/e"),
        ("/a/b", "..", "/"),
        ("/a", "../../x", "/x"),
        ("/a/b", "./", "/a/"),
    ] {
        assert_eq!(joined(base, reference), joins, "{base} {reference}");
    }
}

#[test]
fn invalid_characters_in_urls_are_escaped() {
    assert_eq!(target_of("a b/é\"?x=%20{}"), "/a%20b/%C3%A9%22?x=%20%7B%7D");
}

/// Sends the same text repeatedly while the client reads; returns how many bytes were sent.
async fn endless(text: &'static str) -> (u16, tokio::task::JoinHandle<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let task = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut taken = 0;
        while stream.write_all(text.as_bytes()).await.is_ok() {
            taken += text.len();
        }
        taken
    });
    (port, task)
}

#[tokio::test]
async fn an_endless_response_is_aborted_after_a_quarter_of_a_megabyte() {
    for text in ["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"] {
        let (port, task) = endless(text).await;
        let request =
            Get { tls: false, host: "127.0.0.1", port, path: "/", headers: &[], user_agent: "test" };
        let failed = get(&request, LONG).await.unwrap_err();
        assert!(failed.text.contains("the answer has more than 262144 bytes"), "{failed:?}");
        // The rest is what the kernel keeps for a connection.
        let taken = tokio::time::timeout(LONG, task).await.expect("the connection was closed").unwrap();
        assert!(taken < 32 << 20, "{taken}");
    }
}
