//! Certificates in PEM, written as a kubelet writes them: without headers and text between them.

use keelson_kube_model::base64;

/// The length of a line of PEM, in characters.
const PEM_LINE: usize = 64;

/// The bytes of each PEM block of any type. Headers, text between blocks, and blocks that are not valid are left out.
pub(crate) fn blocks(text: &str) -> Vec<Vec<u8>> {
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    let mut found = Vec::new();
    let mut rest = lines.as_slice();
    while let Some((first, following)) = rest.split_first() {
        rest = following;
        let label = first.strip_prefix("-----BEGIN ").and_then(|label| label.strip_suffix("-----"));
        let Some(label) = label else { continue };
        let end = rest.iter().position(|line| line.starts_with("-----")).unwrap_or(rest.len());
        let (body, after) = rest.split_at(end);
        let is_closed = after.first().is_some_and(|line| *line == format!("-----END {label}-----"));
        rest = if is_closed { &after[1..] } else { after };
        let headers = body.iter().take_while(|line| line.contains(':')).count();
        let encoded: String = body[headers..].concat().split_whitespace().collect();
        found.extend(base64::decode(&encoded).filter(|_| is_closed));
    }
    found
}

/// A certificate in PEM.
pub(crate) fn certificate(der: &[u8]) -> String {
    let mut text = "-----BEGIN CERTIFICATE-----\n".to_owned();
    let mut rest = base64::encode(der);
    while !rest.is_empty() {
        // Base64 is ASCII.
        let after = rest.split_off(rest.len().min(PEM_LINE));
        text.push_str(&rest);
        text.push('\n');
        rest = after;
    }
    text.push_str("-----END CERTIFICATE-----\n");
    text
}
