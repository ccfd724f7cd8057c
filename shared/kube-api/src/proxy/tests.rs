use super::*;

fn by(named: Option<&str>, https: &str, none: &str, server: &str) -> Result<Option<String>, String> {
    let environment = Environment { https: https.into(), none: none.into() };
    let found = proxy_of(named, &environment, &server.parse().unwrap())?;
    Ok(found.map(|proxy| proxy.uri.to_string()))
}

#[test]
fn kubeconfig_proxy_url_overrides_the_environment() {
    let server = "https://api.example:6443";
    let (one, other) = (Some("http://one:1/".to_owned()), Some("http://two:2/".to_owned()));
    assert_eq!(by(Some("http://one:1"), "two:2", "*", server), Ok(one.clone()));
    assert_eq!(by(Some("http://one:1"), "", "", "https://127.0.0.1:6443"), Ok(one), "for every server");
    for none in [None, Some("")] {
        assert_eq!(by(none, "two:2", "", server), Ok(other.clone()));
        assert_eq!(by(none, "http://two:2", "", server), Ok(other.clone()));
        assert_eq!(by(none, "", "", server), Ok(None));
    }
    assert_eq!(by(None, "two:2", "", "http://api.example"), Ok(None), "HTTPS_PROXY is for https");
}

#[test]
fn no_proxy_hosts_are_dialed_directly_by_the_rules_of_go() {
    for (list, host, excepted) in [
        ("", "api.example", false),
        ("*", "api.example", true),
        ("other, *", "api.example", true),
        ("api.example", "api.example", true),
        ("API.example", "api.Example", true),
        ("example", "api.example", true),
        (".example", "api.example", true),
        (".api.example", "api.example", false),
        ("*.example", "api.example", true),
        ("*.api.example", "api.example", false),
        ("ample", "api.example", false),
        ("api.example:6443", "api.example", true),
        ("api.example:443", "api.example", false),
        ("10.0.0.1", "10.0.0.1", true),
        ("10.0.0.1:6443", "10.0.0.1", true),
        ("10.0.0.1:1", "10.0.0.1", false),
        ("10.0.0.0/8", "10.9.8.7", true),
        ("10.0.0.0/8", "11.0.0.1", false),
        ("0.0.0.0/0", "11.0.0.1", true),
        ("10.0.0.0/8", "api.example", false),
        ("10.0.0.0/33,10.x/8,/", "10.0.0.1", false),
        ("fd00::/8", "[fd00::1]", true),
        ("fd00::/8", "[fe80::1]", false),
        ("fd00::1", "[fd00::1]", true),
        ("[fd00::1]:6443", "[fd00::1]", true),
        ("[fd00::1]:1", "[fd00::1]", false),
        (",, ,", "api.example", false),
        ("", "localhost", true),
        ("", "127.0.0.53", true),
        ("", "[::1]", true),
    ] {
        assert_eq!(is_excepted(list, host, 6443), excepted, "{list} {host}");
        let server = format!("https://{host}:6443");
        assert_eq!(by(None, "p:1", list, &server).unwrap().is_none(), excepted, "{list} {host}");
    }
    assert!(by(None, "p:1", "api.example:6443", "https://api.example").unwrap().is_some(), "443 is meant");
}

#[test]
fn proxy_credentials_are_sent_and_never_shown_in_errors() {
    let proxy = Proxy::parse("http://jane:p%40ss%3a@proxy:3128").unwrap();
    // jane:p@ss:
    assert_eq!(proxy.authorization().unwrap(), "Basic amFuZTpwQHNzOg==");
    assert_eq!(Proxy::parse("proxy").unwrap().authorization(), None);
    for wrong in [
        "ftp://u:secret@proxy",
        "socks4://u:secret@proxy:1",
        "http://u:secret@",
        "http://u:secret@a b",
        "socks5://u:secret%ff@p",
    ] {
        let message = by(Some(wrong), "", "", "https://api").unwrap_err();
        assert!(message.starts_with("proxy-url: ") && !message.contains("secret"), "{message}");
    }
    let message = by(None, "socks4://proxy:1", "", "https://api").unwrap_err();
    assert!(message.starts_with("HTTPS_PROXY: a proxy is named as http://"), "{message}");
    let long = format!("socks5://jane:{}@proxy", "x".repeat(256));
    assert!(by(Some(&long), "", "", "https://api").unwrap_err().contains("255 bytes"));
}

#[test]
fn proxy_without_a_port_gets_the_default_port_of_its_scheme() {
    for (uri, expected) in [
        ("socks5://proxy", "socks5://proxy:1080/"),
        ("socks5://[fd00::1]", "socks5://[fd00::1]:1080/"),
        ("socks5h://proxy:9", "socks5h://proxy:9"),
    ] {
        let uri = with_default_port(uri.parse().unwrap(), SOCKS_PORT).to_string();
        assert_eq!(uri.trim_end_matches('/'), expected.trim_end_matches('/'));
    }
}
