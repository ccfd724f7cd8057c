//! Connections over a proxy.

use std::sync::{Arc, Mutex};

use rcgen::ExtendedKeyUsagePurpose;
use rustls::ServerConfig;
use serde_json::json;

use super::{Authority, encoded};
use crate::connect::KubeApi;
use crate::fake::{Answer, FakeApi};
use crate::resource::Resource;

/// A proxy that requires a user name and a password, and the requests that it got.
async fn proxy() -> (String, Arc<Mutex<Vec<String>>>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let kept = Arc::clone(&kept);
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(client.read_u8().await.unwrap());
                }
                let head = String::from_utf8(head).unwrap();
                kept.lock().unwrap().push(head.lines().next().unwrap().to_owned());
                if !head.to_lowercase().contains("proxy-authorization: basic amfuztpw") {
                    client.write_all(b"HTTP/1.1 407 Who?\r\n\r\n").await.unwrap();
                    return;
                }
                let target = head.split(' ').nth(1).unwrap().to_owned();
                let mut server = tokio::net::TcpStream::connect(target).await.unwrap();
                client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                // It ends when either side closes.
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (address, asked)
}

#[tokio::test]
async fn kubeconfig_http_proxy_gets_a_connect_request() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let server =
        FakeApi::with_tls(authority.server(), |_| Answer::json(&json!({"metadata": {"name": "n"}}))).await;
    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    let (address, asked) = proxy().await;
    let api = KubeApi::new(folder.path().join("kubeconfig"), "kubelet/test");
    let cluster =
        |url: String| json!({"certificate-authority-data": encoded(&authority.pem()), "proxy-url": url});

    server.kubeconfig(folder.path(), &cluster(format!("http://{address}")), &user);
    let error = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(error.contains("proxy"), "{error}");

    server.kubeconfig(folder.path(), &cluster(format!("http://jane:p@{address}")), &user);
    api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    assert_eq!(server.asked().last().unwrap().version, http::Version::HTTP_2);
    let line = format!("CONNECT {} HTTP/1.1", server.url.strip_prefix("https://").unwrap());
    let asked = asked.lock().unwrap().clone();
    assert!(asked.len() >= 2 && asked.iter().all(|first| *first == line), "{asked:?}");
}

/// A SOCKS proxy that requires the user `jane` with the password `p`, and the targets requested from it.
async fn socks_proxy() -> (String, Arc<Mutex<Vec<String>>>) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
    async fn bytes(client: &mut tokio::net::TcpStream, count: usize) -> Vec<u8> {
        let mut read = vec![0; count];
        client.read_exact(&mut read).await.unwrap();
        read
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let kept = Arc::clone(&kept);
            tokio::spawn(async move {
                // RFC 1928 and 1929.
                let methods = bytes(&mut client, 2).await[1];
                let methods = bytes(&mut client, methods.into()).await;
                if !methods.contains(&2) {
                    client.write_all(&[5, 0xff]).await.unwrap();
                    return;
                }
                client.write_all(&[5, 2]).await.unwrap();
                let name = bytes(&mut client, 2).await[1];
                let name = bytes(&mut client, name.into()).await;
                let password = client.read_u8().await.unwrap();
                let password = bytes(&mut client, password.into()).await;
                let is_known = (&*name, &*password) == (b"jane", b"p");
                client.write_all(&[1, u8::from(!is_known)]).await.unwrap();
                if !is_known {
                    return;
                }
                let host = match bytes(&mut client, 4).await[3] {
                    1 => std::net::Ipv4Addr::from(<[u8; 4]>::try_from(bytes(&mut client, 4).await).unwrap())
                        .to_string(),
                    _ => {
                        let length = client.read_u8().await.unwrap();
                        String::from_utf8(bytes(&mut client, length.into()).await).unwrap()
                    }
                };
                let port = client.read_u16().await.unwrap();
                kept.lock().unwrap().push(format!("{host}:{port}"));
                let mut server = tokio::net::TcpStream::connect((host, port)).await.unwrap();
                client.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await.unwrap();
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (address, asked)
}

#[tokio::test]
async fn socks_proxy_connects_and_resolves_names_itself() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let server =
        FakeApi::with_tls(authority.server(), |_| Answer::json(&json!({"metadata": {"name": "n"}}))).await;
    let (address, asked) = socks_proxy().await;
    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    let api = KubeApi::new(folder.path().join("kubeconfig"), "kubelet/test");
    let cluster =
        |url: String| json!({"certificate-authority-data": encoded(&authority.pem()), "proxy-url": url});
    for refused in ["", "jane:q@"] {
        server.kubeconfig(folder.path(), &cluster(format!("socks5://{refused}{address}")), &user);
        let error = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
        assert!(error.contains("proxy"), "{error}");
    }
    for scheme in ["socks5", "socks5h"] {
        server.kubeconfig(folder.path(), &cluster(format!("{scheme}://jane:p@{address}")), &user);
        api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    }
    let target = server.url.strip_prefix("https://").unwrap();
    let asked = asked.lock().unwrap().clone();
    assert!(asked.len() >= 2 && asked.iter().all(|one| one == target), "{asked:?}");
}

/// Terminates TLS and forwards to a plain HTTP proxy.
async fn within_tls(mut config: ServerConfig, to: String) -> String {
    use tokio::io::copy_bidirectional;
    config.alpn_protocols.clear();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (acceptor, to) = (acceptor.clone(), to.clone());
            tokio::spawn(async move {
                let Ok(mut client) = acceptor.accept(client).await else { return };
                let mut proxy = tokio::net::TcpStream::connect(to).await.unwrap();
                let _ = copy_bidirectional(&mut client, &mut proxy).await;
            });
        }
    });
    address
}

#[tokio::test]
async fn https_proxy_needs_a_trusted_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let (authority, stranger) = (Authority::new(), Authority::new());
    let server =
        FakeApi::with_tls(authority.server(), |_| Answer::json(&json!({"metadata": {"name": "n"}}))).await;
    let (plain, asked) = proxy().await;
    let (certificate, key) = authority.signed(ExtendedKeyUsagePurpose::ClientAuth);
    let user = json!({"client-certificate-data": encoded(&certificate), "client-key-data": encoded(&key)});
    let api = KubeApi::new(folder.path().join("kubeconfig"), "kubelet/test");
    let cluster =
        |url: String| json!({"certificate-authority-data": encoded(&authority.pem()), "proxy-url": url});

    let address = within_tls(stranger.server(), plain.clone()).await;
    server.kubeconfig(folder.path(), &cluster(format!("https://jane:p@{address}")), &user);
    let error = api.get(Resource::NODE, None, "n").await.unwrap_err().to_string();
    assert!(error.contains("the proxy") && error.contains("certificate"), "{error}");
    assert_eq!(asked.lock().unwrap().len(), 0);

    let address = within_tls(authority.server(), plain).await;
    server.kubeconfig(folder.path(), &cluster(format!("https://jane:p@{address}")), &user);
    api.get(Resource::NODE, None, "n").await.unwrap().unwrap();
    assert!(!asked.lock().unwrap().is_empty());
}
