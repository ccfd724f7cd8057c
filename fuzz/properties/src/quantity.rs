//! Quantities: one on the first line, and perhaps another one on the second.

use keelson_kube_model::Quantity;

use crate::Met;

/// Billionths in one unit.
const NANOS: i128 = 1_000_000_000;
/// Largest magnitude: 2^63 - 1 units (the API's `int64`).
const MAX_NANOS: i128 = i64::MAX as i128 * NANOS;
/// So many digits before the point, times 1024, are still below the largest amount.
const SMALL: usize = 15;
/// So many digits behind the point are exact.
const EXACT: usize = 9;

/// Checks the amounts that stand in `bytes`.
///
/// # Panics
/// Something does not hold.
pub fn check(bytes: &[u8]) -> Met {
    let Ok(text) = std::str::from_utf8(bytes) else { return Met::Foreign };
    let (first, second) = text.split_once('\n').unwrap_or((text, "0"));
    let one = match Quantity::parse(first) {
        Ok(quantity) => quantity,
        Err(error) => {
            assert!(!error.to_string().is_empty(), "{first:?}");
            assert!(serde_json::from_value::<Quantity>(first.into()).is_err(), "{first:?}");
            return Met::Refused;
        }
    };
    is_printed_as_itself(first, one);
    is_rounded_away_from_zero(first, one);
    has_a_sign(first, one);
    is_scaled_by_its_suffix(first);
    if let Ok(other) = Quantity::parse(second) {
        are_ordered_and_added(one, other);
    }
    Met::Good
}

fn read(text: &str) -> Quantity {
    Quantity::parse(text).unwrap_or_else(|error| panic!("{text:?} must be a quantity: {error}"))
}

fn is_printed_as_itself(text: &str, quantity: Quantity) {
    let printed = quantity.to_string();
    let again = read(&printed);
    assert_eq!(again, quantity, "{text:?} was printed as {printed:?}");
    // `2000` with a binary suffix family is printed as `2000`, which is decimal and then `2k`: from there on it stays.
    let canonical = again.to_string();
    assert_eq!(read(&canonical).to_string(), canonical, "{text:?}");
    assert!(printed.len() <= 32, "{text:?} was printed as {printed:?}");
    let json = serde_json::to_value(quantity).expect("a quantity is a JSON string");
    assert_eq!(serde_json::from_value::<Quantity>(json).ok(), Some(quantity), "{text:?}");
}

fn is_rounded_away_from_zero(text: &str, quantity: Quantity) {
    let nanos = quantity.nanos();
    assert!(nanos.abs() <= MAX_NANOS, "{text:?} is {nanos} billionths");
    let rounded = |value: i64, by: i128| {
        let value = i128::from(value);
        let cut = value == i128::from(i64::MAX) || value == i128::from(i64::MIN);
        let enough = value.abs() * by >= nanos.abs();
        let no_more = value == 0 || (value.abs() - 1) * by < nanos.abs();
        assert!(cut || (enough && no_more), "{text:?}: {value} of {nanos}");
        assert!(value.signum() == nanos.signum(), "{text:?}: {value} of {nanos}");
    };
    rounded(quantity.value(), NANOS);
    rounded(quantity.milli_value(), 1_000_000);
    assert_eq!(quantity.is_zero(), nanos == 0);
    assert_eq!(quantity.is_negative(), nanos < 0);
}

fn has_a_sign(text: &str, quantity: Quantity) {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let plus = read(&format!("+{unsigned}"));
    let minus = read(&format!("-{unsigned}"));
    assert_eq!(plus, read(unsigned), "{text:?}");
    assert_eq!(plus.nanos(), -minus.nanos(), "{text:?}");
    assert!(quantity == plus || quantity == minus, "{text:?}");
}

/// What a suffix does, told by the others.
fn is_scaled_by_its_suffix(text: &str) {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let number = &unsigned[..end];
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() > SMALL || fraction.len() > EXACT {
        return;
    }
    let nanos = read(number).nanos();
    for (suffix, factor) in
        [("k", 1_000), ("e3", 1_000), ("E3", 1_000), ("e+3", 1_000), ("Ki", 1_024), ("", 1)]
    {
        assert_eq!(read(&format!("{number}{suffix}")).nanos(), nanos * factor, "{number}{suffix}");
    }
    if fraction.len() <= EXACT - 3 {
        for suffix in ["m", "e-3"] {
            assert_eq!(read(&format!("{number}{suffix}")).nanos() * 1_000, nanos, "{number}{suffix}");
        }
    }
    assert_eq!(read(&format!("0{number}")).nanos(), nanos, "0{number}");
    if number.contains('.') {
        assert_eq!(read(&format!("{number}0")).nanos(), nanos, "{number}0");
    }
}

fn are_ordered_and_added(one: Quantity, other: Quantity) {
    assert_eq!(one.cmp(&other), one.nanos().cmp(&other.nanos()), "{one} and {other}");
    assert_eq!(one == other, one.nanos() == other.nanos(), "{one} and {other}");
    let sum = one + other;
    assert_eq!(sum, other + one, "{one} and {other}");
    assert_eq!(sum.nanos(), (one.nanos() + other.nanos()).clamp(-MAX_NANOS, MAX_NANOS), "{one} and {other}");
    assert_eq!((one - other).nanos(), -(other - one).nanos(), "{one} and {other}");
    assert!(read(&sum.to_string()) == sum, "{one} and {other} are {sum}");
}
