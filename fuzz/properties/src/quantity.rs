//! Quantities: one on the first line and, optionally, another one on the second.

use keelson_kube_model::Quantity;

use crate::Outcome;

/// The billionths in one unit.
const NANOS: i128 = 1_000_000_000;
/// The largest magnitude: 2^63 - 1 units (the API's `int64`).
const MAX_NANOS: i128 = i64::MAX as i128 * NANOS;
/// A number with this many digits before the decimal point, times 1024, is still below the largest amount.
const MAX_WHOLE_DIGITS: usize = 15;
/// The number of digits after the decimal point that are represented exactly.
const EXACT_FRACTION_DIGITS: usize = 9;

/// Checks the quantities in `bytes`.
///
/// # Panics
/// A property is violated.
pub fn check(bytes: &[u8]) -> Outcome {
    let Ok(text) = std::str::from_utf8(bytes) else { return Outcome::Skipped };
    let (first, second) = text.split_once('\n').unwrap_or((text, "0"));
    let one = match Quantity::parse(first) {
        Ok(quantity) => quantity,
        Err(error) => {
            assert!(!error.to_string().is_empty(), "{first:?}");
            assert!(serde_json::from_value::<Quantity>(first.into()).is_err(), "{first:?}");
            return Outcome::Rejected;
        }
    };
    assert_printing_keeps_the_amount(first, one);
    assert_values_round_away_from_zero(first, one);
    assert_signs_negate(first, one);
    assert_suffixes_scale(first);
    if let Ok(other) = Quantity::parse(second) {
        assert_order_and_sums(one, other);
    }
    Outcome::Accepted
}

fn parse(text: &str) -> Quantity {
    Quantity::parse(text).unwrap_or_else(|error| panic!("{text:?} must be a quantity: {error}"))
}

fn assert_printing_keeps_the_amount(text: &str, quantity: Quantity) {
    let printed = quantity.to_string();
    let again = parse(&printed);
    assert_eq!(again, quantity, "{text:?} was printed as {printed:?}");
    // `2000` of the binary suffix family is printed as `2000`, which parses as decimal and is printed as `2k`. Then it is stable.
    let canonical = again.to_string();
    assert_eq!(parse(&canonical).to_string(), canonical, "{text:?}");
    assert!(printed.len() <= 32, "{text:?} was printed as {printed:?}");
    let json = serde_json::to_value(quantity).expect("a quantity is a JSON string");
    assert_eq!(serde_json::from_value::<Quantity>(json).ok(), Some(quantity), "{text:?}");
}

fn assert_values_round_away_from_zero(text: &str, quantity: Quantity) {
    let nanos = quantity.nanos();
    assert!(nanos.abs() <= MAX_NANOS, "{text:?} is {nanos} billionths");
    let assert_rounded = |value: i64, nanos_per_unit: i128| {
        let value = i128::from(value);
        let is_clamped = value == i128::from(i64::MAX) || value == i128::from(i64::MIN);
        let is_enough = value.abs() * nanos_per_unit >= nanos.abs();
        let is_least = value == 0 || (value.abs() - 1) * nanos_per_unit < nanos.abs();
        assert!(is_clamped || (is_enough && is_least), "{text:?}: {value} of {nanos}");
        assert!(value.signum() == nanos.signum(), "{text:?}: {value} of {nanos}");
    };
    assert_rounded(quantity.value(), NANOS);
    assert_rounded(quantity.milli_value(), 1_000_000);
    assert_eq!(quantity.is_zero(), nanos == 0);
    assert_eq!(quantity.is_negative(), nanos < 0);
}

fn assert_signs_negate(text: &str, quantity: Quantity) {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let plus = parse(&format!("+{unsigned}"));
    let minus = parse(&format!("-{unsigned}"));
    assert_eq!(plus, parse(unsigned), "{text:?}");
    assert_eq!(plus.nanos(), -minus.nanos(), "{text:?}");
    assert!(quantity == plus || quantity == minus, "{text:?}");
}

/// Compares the amounts of the same number with different suffixes.
fn assert_suffixes_scale(text: &str) {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let number = &unsigned[..end];
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() > MAX_WHOLE_DIGITS || fraction.len() > EXACT_FRACTION_DIGITS {
        return;
    }
    let nanos = parse(number).nanos();
    for (suffix, factor) in
        [("k", 1_000), ("e3", 1_000), ("E3", 1_000), ("e+3", 1_000), ("Ki", 1_024), ("", 1)]
    {
        assert_eq!(parse(&format!("{number}{suffix}")).nanos(), nanos * factor, "{number}{suffix}");
    }
    if fraction.len() <= EXACT_FRACTION_DIGITS - 3 {
        for suffix in ["m", "e-3"] {
            assert_eq!(parse(&format!("{number}{suffix}")).nanos() * 1_000, nanos, "{number}{suffix}");
        }
    }
    assert_eq!(parse(&format!("0{number}")).nanos(), nanos, "0{number}");
    if number.contains('.') {
        assert_eq!(parse(&format!("{number}0")).nanos(), nanos, "{number}0");
    }
}

fn assert_order_and_sums(one: Quantity, other: Quantity) {
    assert_eq!(one.cmp(&other), one.nanos().cmp(&other.nanos()), "{one} and {other}");
    assert_eq!(one == other, one.nanos() == other.nanos(), "{one} and {other}");
    let sum = one + other;
    assert_eq!(sum, other + one, "{one} and {other}");
    assert_eq!(sum.nanos(), (one.nanos() + other.nanos()).clamp(-MAX_NANOS, MAX_NANOS), "{one} and {other}");
    assert_eq!((one - other).nanos(), -(other - one).nanos(), "{one} and {other}");
    assert!(parse(&sum.to_string()) == sum, "{one} and {other} are {sum}");
}
