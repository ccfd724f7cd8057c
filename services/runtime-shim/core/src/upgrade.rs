//! The head of an HTTP/1.1 response, which begins the response to an upgrade request.

/// A longer head is refused.
pub const MAX_HEAD_BYTES: usize = 16 << 10;

/// Status and headers of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// 101, 404…
    pub status: u16,
    headers: Vec<(String, String)>,
}

/// Bytes that are not an HTTP response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// The first line is not a status line.
    #[error("the response is not HTTP/1.1")]
    NotHttp,
    /// The head does not end within [`MAX_HEAD_BYTES`].
    #[error("the head of the response is longer than {MAX_HEAD_BYTES} bytes")]
    TooLong,
}

impl Head {
    /// Parses a head and returns its length in bytes; `None` while it is incomplete.
    ///
    /// # Errors
    /// See [`HeadError`].
    pub fn parse(input: &[u8]) -> Result<Option<(Self, usize)>, HeadError> {
        let Some(length) = input.windows(4).position(|four| four == b"\r\n\r\n") else {
            return if input.len() > MAX_HEAD_BYTES { Err(HeadError::TooLong) } else { Ok(None) };
        };
        if length > MAX_HEAD_BYTES {
            return Err(HeadError::TooLong);
        }
        let text = String::from_utf8_lossy(&input[..length]);
        let mut lines = text.split("\r\n");
        let first = lines.next().unwrap_or_default();
        let status = first.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1));
        let status =
            status.filter(|s| s.len() == 3).and_then(|s| s.parse().ok()).ok_or(HeadError::NotHttp)?;
        let headers = lines.filter_map(|line| line.split_once(':'));
        let headers =
            headers.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect();
        Ok(Some((Self { status, headers }, length + 4)))
    }

    /// All headers, as received.
    pub fn headers(&self) -> &[(String, String)] {
        &self.headers
    }

    /// The first value of a header, by case-insensitive name.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn response_head_is_parsed_once_complete_and_the_rest_left() {
        let bytes =
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: SPDY/3.1\r\nodd\r\nx-a:1:2 \r\n\r\n\x80\x03";
        let whole = bytes.len() - 2;
        for cut in 0..whole {
            assert_eq!(Head::parse(&bytes[..cut]), Ok(None), "{cut}");
        }
        let (head, length) = Head::parse(bytes).unwrap().unwrap();
        assert_eq!((head.status, length), (101, whole));
        assert_eq!((head.header("upgrade"), head.header("X-A")), (Some("SPDY/3.1"), Some("1:2")));
        assert_eq!(head.header("odd"), None);
        let all = [("Upgrade", "SPDY/3.1"), ("x-a", "1:2")].map(|(n, v)| (n.to_owned(), v.to_owned()));
        assert_eq!(head.headers(), all);
    }

    #[test]
    fn response_head_that_is_not_http_or_too_long_is_refused() {
        for text in [
            "SSH-2.0-x\r\n\r\n",
            "HTTP/1.1\r\n\r\n",
            "HTTP/1.1 1 x\r\n\r\n",
            "HTTP/1.1 abc\r\n\r\n",
            "\r\n\r\n",
        ] {
            assert_eq!(Head::parse(text.as_bytes()), Err(HeadError::NotHttp), "{text:?}");
        }
        let mut longest = b"HTTP/1.1 200 OK\r\n".to_vec();
        longest.resize(MAX_HEAD_BYTES, b'a');
        assert_eq!(Head::parse(&longest), Ok(None));
        longest.extend(b"\r\n\r\n");
        assert_eq!(Head::parse(&longest).unwrap().unwrap().1, MAX_HEAD_BYTES + 4);
        let mut endless = b"HTTP/1.1 200 OK\r\n".to_vec();
        endless.resize(MAX_HEAD_BYTES + 1, b'a');
        assert_eq!(Head::parse(&endless), Err(HeadError::TooLong));
        endless.extend(b"\r\n\r\n");
        assert_eq!(Head::parse(&endless), Err(HeadError::TooLong));
    }
}
