//! Where an answer of HTTP sends a request that it redirects, and what may go there with it.

/// How many answers in a row may send a request elsewhere, as many as Go's client follows.
pub const MOST: usize = 10;

/// Where a request goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Next {
    /// The whole URL.
    pub url: String,
    /// The same scheme, host and port as before: what was said there may be said again.
    pub same_origin: bool,
}

/// Why a request does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotFollowed {
    /// From TLS to none.
    #[error("without TLS, which the manifests were to come with")]
    WithoutTls,
    /// Another scheme.
    #[error("which is neither http nor https")]
    Scheme,
}

/// Where `location` (RFC 9110, 10.2.2) leads a request to `url`, which is whole: it has a scheme and a host.
///
/// Parity: Go's client goes from https to http as well, and takes all headers but the well-known credentials to any host, those to
/// hosts below the first one. Here what any header says may be a credential.
///
/// # Errors
/// It leads where no manifest is taken from.
pub fn follow(url: &str, location: &str) -> Result<Next, NotFollowed> {
    let location = location.split('#').next().unwrap_or_default();
    let (scheme, authority, path) = parts(url);
    let (path, query) = path.split_once('?').map_or((path, ""), |(path, query)| (path, query));
    let whole = if has_scheme(location) {
        location.to_owned()
    } else if let Some(rest) = location.strip_prefix("//") {
        format!("{scheme}://{rest}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{}", without_dots(location))
    } else if location.starts_with('?') {
        format!("{scheme}://{authority}{path}{location}")
    } else if location.is_empty() {
        let query = if query.is_empty() { String::new() } else { format!("?{query}") };
        format!("{scheme}://{authority}{path}{query}")
    } else {
        let folder = path.rfind('/').map_or("/", |end| &path[..=end]);
        format!("{scheme}://{authority}{}", without_dots(&format!("{folder}{location}")))
    };
    let (to_scheme, to_authority, _) = parts(&whole);
    match (scheme.eq_ignore_ascii_case("https"), to_scheme.to_ascii_lowercase().as_str()) {
        (_, "https") | (false, "http") => {}
        (true, "http") => return Err(NotFollowed::WithoutTls),
        (_, _) => return Err(NotFollowed::Scheme),
    }
    let same_origin = scheme.eq_ignore_ascii_case(to_scheme)
        && with_port(scheme, authority) == with_port(to_scheme, to_authority);
    Ok(Next { url: whole, same_origin })
}

/// Scheme, host with port, and the rest.
fn parts(url: &str) -> (&str, &str, &str) {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    (scheme, authority, path)
}

fn has_scheme(location: &str) -> bool {
    let Some((scheme, _)) = location.split_once(':') else { return false };
    scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

fn with_port(scheme: &str, authority: &str) -> String {
    let port = if scheme.eq_ignore_ascii_case("https") { ":443" } else { ":80" };
    let authority = authority.to_ascii_lowercase();
    authority.strip_suffix(port).map_or_else(|| authority.clone(), str::to_owned)
}

/// RFC 3986, 5.2.4, for a path that begins with `/` and the query behind it.
fn without_dots(path: &str) -> String {
    let (path, query) = path.split_at(path.find('?').unwrap_or(path.len()));
    let mut kept: Vec<&str> = Vec::new();
    let mut is_folder = false;
    for part in path.split('/').skip(1) {
        is_folder = matches!(part, "." | "..");
        match part {
            "." => {}
            ".." => drop(kept.pop()),
            part => kept.push(part),
        }
    }
    let end = if is_folder && !kept.is_empty() { "/" } else { "" };
    format!("/{}{end}{query}", kept.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_is_whole_or_counts_from_where_it_was_said() {
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
    fn nothing_leads_from_tls_to_none_or_out_of_http() {
        assert_eq!(follow("https://h/a", "http://h/a"), Err(NotFollowed::WithoutTls));
        for to in ["file:///etc/passwd", "ftp://h/a", "mailto:a"] {
            assert_eq!(follow("http://h/a", to), Err(NotFollowed::Scheme), "{to}");
        }
    }
}
