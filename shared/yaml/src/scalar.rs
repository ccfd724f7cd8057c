//! Plain scalars and keys by the rules of YAML 1.1, as the kubelet's YAML library reads them.

use serde_json::{Number, Value};

/// Resolves a plain scalar by the rules of the kubelet's YAML library.
pub(crate) fn resolve_plain(text: &str) -> Result<Value, String> {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Ok(Value::Null),
        "true" | "True" | "TRUE" | "y" | "Y" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => {
            return Ok(Value::Bool(true));
        }
        "false" | "False" | "FALSE" | "n" | "N" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => {
            return Ok(Value::Bool(false));
        }
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" | "-.inf" | "-.Inf" | "-.INF" | ".nan"
        | ".NaN" | ".NAN" => {
            return Err(format!("JSON has no number {text}; quote it if it is text"));
        }
        _ => {}
    }
    if !text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.')) {
        return Ok(Value::String(text.to_owned()));
    }
    Ok(integer(text).or_else(|| float(text)).map_or_else(|| Value::String(text.to_owned()), Value::Number))
}

/// Converts a plain key to text as the kubelet's YAML library does: `on` is `true`, `0644` is `420`, `1.10` is `1.1`.
pub(crate) fn plain_key(text: &str) -> Result<String, String> {
    if text == "<<" {
        return Ok(text.to_owned());
    }
    match resolve_plain(text)? {
        Value::String(text) => Ok(text),
        Value::Bool(value) => Ok(value.to_string()),
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            // As Go formats a 32-bit float without an exponent.
            Some(float) if float == 0.0 || (1e-4..1e6).contains(&float.abs()) => {
                Ok((float as f32).to_string())
            }
            Some(_) => Err(format!("the key {text} is a number without a plain text form; quote it")),
            None => Ok(number.to_string()),
        },
        _ => Err("a key must be text; quote it".to_owned()),
    }
}

/// Decimal, `0x`, `0o`, `0b` and, with a leading zero, octal integers; underscores between digits are ignored.
fn integer(text: &str) -> Option<Number> {
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let digits = digits.replace('_', "");
    let lower = digits.to_ascii_lowercase();
    let (radix, digits) = if let Some(rest) = lower.strip_prefix("0x") {
        (16, rest)
    } else if let Some(rest) = lower.strip_prefix("0o") {
        (8, rest)
    } else if let Some(rest) = lower.strip_prefix("0b") {
        (2, rest)
    } else if lower.len() > 1 && lower.starts_with('0') {
        (8, &lower[1..])
    } else {
        (10, lower.as_str())
    };
    // The parser below would accept a second sign.
    if !digits.starts_with(|c: char| c.is_ascii_hexdigit()) {
        return None;
    }
    let magnitude = u64::from_str_radix(digits, radix).ok()?;
    if negative {
        0i64.checked_sub_unsigned(magnitude).map(Number::from)
    } else {
        Some(Number::from(magnitude))
    }
}

fn float(text: &str) -> Option<Number> {
    let digits = text.replace('_', "");
    let body = digits.strip_prefix(['-', '+']).unwrap_or(&digits);
    let is_decimal = body.bytes().any(|b| b.is_ascii_digit())
        && body.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && body.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-'));
    if !is_decimal {
        return None;
    }
    let number: f64 = digits.parse().ok()?;
    // Go writes a whole float without a decimal point in JSON, so that it reads as an integer again.
    if number.fract() == 0.0 && number.abs() < 9_007_199_254_740_992.0 {
        return Some(Number::from(number as i64));
    }
    Number::from_f64(number)
}
