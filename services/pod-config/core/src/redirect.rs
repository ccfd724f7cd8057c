//! Which HTTP redirects are followed, and whether the configured headers may be sent along.

/// How many redirects are followed in a row, as many as in Go's client.
pub const MAX_REDIRECTS: usize = 10;

/// The target of a redirect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    /// The absolute URL.
    pub url: String,
    /// The target has the same scheme, host and port, so the headers may be sent to it.
    pub same_origin: bool,
}

/// Why a redirect is not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RedirectError {
    /// From https to http.
    #[error("from https to http, which is not followed")]
    WithoutTls,
    /// To a scheme other than http and https.
    #[error("to a URL that is neither http nor https")]
    Scheme,
}

/// Resolves `location` (RFC 9110, 10.2.2) against `url`, which must be absolute.
///
/// Parity: Go's client also follows from https to http. It sends the well-known credential headers to subdomains of the first
/// host, and all other headers to any host. Here any header may be a credential, so none leaves its origin.
///
/// # Errors
/// The redirect must not be followed.
pub fn follow(url: &str, location: &str) -> Result<Redirect, RedirectError> {
    let location = location.split('#').next().unwrap_or_default();
    let (scheme, authority, path) = split_url(url);
    let (path, query) = path.split_once('?').map_or((path, ""), |(path, query)| (path, query));
    let target = if has_scheme(location) {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{scheme}://{rest}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{}", remove_dot_segments(location))
    } else if location.starts_with('?') {
        format!("{scheme}://{authority}{path}{location}")
    } else if location.is_empty() {
        let query = if query.is_empty() { String::new() } else { format!("?{query}") };
        format!("{scheme}://{authority}{path}{query}")
    } else {
        let folder = path.rfind('/').map_or("/", |end| &path[..=end]);
        format!("{scheme}://{authority}{}", remove_dot_segments(&format!("{folder}{location}")))
    };
    let (to_scheme, to_authority, _) = split_url(&target);
    match (scheme.eq_ignore_ascii_case("https"), to_scheme.to_ascii_lowercase().as_str()) {
        (_, "https") | (false, "http") => {}
        (true, "http") => return Err(RedirectError::WithoutTls),
        (_, _) => return Err(RedirectError::Scheme),
    }
    let same_origin = scheme.eq_ignore_ascii_case(to_scheme)
        && without_default_port(scheme, authority) == without_default_port(to_scheme, to_authority);
    Ok(Redirect { url: target, same_origin })
}

/// Splits a URL into scheme, host with port, and the rest.
fn split_url(url: &str) -> (&str, &str, &str) {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    (scheme, authority, path)
}

fn has_scheme(location: &str) -> bool {
    let Some((scheme, _)) = location.split_once(':') else { return false };
    scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

fn without_default_port(scheme: &str, authority: &str) -> String {
    let port = if scheme.eq_ignore_ascii_case("https") { ":443" } else { ":80" };
    let authority = authority.to_ascii_lowercase();
    authority.strip_suffix(port).map_or_else(|| authority.clone(), str::to_owned)
}

/// RFC 3986, 5.2.4, for a path that begins with `/`, followed by its query.
fn remove_dot_segments(path: &str) -> String {
    let (path, query) = path.split_at(path.find('?').unwrap_or(path.len()));
    let mut segments: Vec<&str> = Vec::new();
    let mut is_folder = false;
    for segment in path.split('/').skip(1) {
        is_folder = matches!(segment, "." | "..");
        match segment {
            "." => {}
            ".." => drop(segments.pop()),
            segment => segments.push(segment),
        }
    }
    let end = if is_folder && !segments.is_empty() { "/" } else { "" };
    format!("/{}{end}{query}", segments.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redirect_location_is_absolute_or_relative_to_the_request_url() {
        let from = "https://h:8443/a/b.yaml?x=1";
        for (location, to) in [
            ("https://other/c", "https://other/c"),
            ("//other/c", "https://other/c"),
            ("/c?y=2#z", "https://h:8443/c?y=2"),
            ("c", "https://h:8443/a/c"),
            ("../c", "https://h:8443/c"),
            ("../../c/./d/..", "https://h:8443/c/"),
            ("/..", "https://h:8443/"),
            ("?y=2", "https://h:8443/a/b.yaml?y=2"),
            ("", from),
            ("#z", from),
            ("c?u=http://z", "https://h:8443/a/c?u=http://z"),
        ] {
            assert_eq!(follow(from, location).map(|next| next.url), Ok(to.to_owned()), "{location}");
        }
        assert_eq!(follow("http://h", "c").map(|next| next.url), Ok("http://h/c".to_owned()));
        assert_eq!(follow("http://h?a", "?b").map(|next| next.url), Ok("http://h?b".to_owned()));
    }

    #[test]
    fn another_scheme_host_or_port_is_another_origin() {
        for (from, to, same_origin) in [
            ("http://h/a", "/b", true),
            ("http://h/a", "http://H:80/b", true),
            ("https://h:443/a", "HTTPS://h/b", true),
            ("http://h/a", "https://h/a", false),
            ("http://h/a", "http://h:8080/a", false),
            ("http://h/a", "http://sub.h/a", false),
            ("http://h/a", "http://h@evil/a", false),
            ("http://h/a", "http://h.evil/a", false),
            ("http://h/a", "//h", true),
        ] {
            assert_eq!(follow(from, to).map(|next| next.same_origin), Ok(same_origin), "{from} {to}");
        }
    }

    #[test]
    fn redirects_from_https_to_http_or_to_other_schemes_are_rejected() {
        assert_eq!(follow("https://h/a", "http://h/a"), Err(RedirectError::WithoutTls));
        for to in ["file:///etc/passwd", "ftp://h/a", "mailto:a"] {
            assert_eq!(follow("http://h/a", to), Err(RedirectError::Scheme), "{to}");
        }
    }
}
