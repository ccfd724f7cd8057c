//! `resource.Quantity`: amounts such as `500m`, `1.5Gi` or `2e3`.
//!
//! Values are held exactly, in billionths of a unit (the API's own precision). Finer values are rounded away from zero;
//! values above 2^63 - 1 units are capped, as the API machinery does. The text remembers whether it
//! was written with decimal, binary or exponent suffixes and is printed canonically in the same manner.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

/// Billionths in one unit.
const NANOS: i128 = 1_000_000_000;
/// Largest magnitude, in billionths of a unit: 2^63 - 1 units.
const MAX_NANOS: i128 = (i64::MAX as i128) * NANOS;

/// The family of suffixes a quantity is written with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum QuantityFormat {
    /// `n u m k M G T P E`, powers of 1000.
    #[default]
    DecimalSi,
    /// `Ki Mi Gi Ti Pi Ei`, powers of 1024.
    BinarySi,
    /// `e3`, `E6`, ….
    DecimalExponent,
}

/// An exact amount. Comparison and equality look at the amount only: `1024` equals `1Ki`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quantity {
    nanos: i128,
    format: QuantityFormat,
}

/// Why a text is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ParseQuantityError {
    /// There is no text.
    #[error("a quantity must not be empty")]
    Empty,
    /// Sign, digits and point do not form a number.
    #[error("quantity {text:?} does not begin with a number")]
    Number {
        /// The text as given.
        text: String,
    },
    /// The text after the number is not a suffix.
    #[error("quantity {text:?} has the unknown suffix {suffix:?}")]
    Suffix {
        /// The text as given.
        text: String,
        /// What follows the number.
        suffix: String,
    },
}

/// The meaning of a suffix.
struct Scale {
    /// Power of ten.
    exponent: i32,
    /// Power of two.
    shift: u32,
    format: QuantityFormat,
}

impl Quantity {
    /// Nothing.
    pub const ZERO: Self = Self { nanos: 0, format: QuantityFormat::DecimalSi };

    /// Parses text such as `100m`, `1Gi`, `-.5` or `1e3`.
    ///
    /// Errors name the text. Blanks are not trimmed: they are an error, as in the API.
    pub fn parse(text: &str) -> Result<Self, ParseQuantityError> {
        if text.is_empty() {
            return Err(ParseQuantityError::Empty);
        }
        let (negative, unsigned) = match text.as_bytes()[0] {
            b'-' => (true, &text[1..]),
            b'+' => (false, &text[1..]),
            _ => (false, text),
        };
        let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(ParseQuantityError::Number { text: text.to_owned() });
        }
        let scale = parse_suffix(suffix)
            .ok_or_else(|| ParseQuantityError::Suffix { text: text.to_owned(), suffix: suffix.to_owned() })?;
        let magnitude = magnitude(whole, fraction, &scale);
        let below_one = magnitude > 0 && magnitude < NANOS;
        let format = match scale.format {
            QuantityFormat::BinarySi if below_one => QuantityFormat::DecimalSi,
            format => format,
        };
        Ok(Self { nanos: if negative { -magnitude } else { magnitude }, format })
    }

    /// A whole number of units.
    pub fn from_units(units: i64, format: QuantityFormat) -> Self {
        Self { nanos: i128::from(units) * NANOS, format }.clamped()
    }

    /// A number of thousandths, printed with decimal suffixes (CPU).
    pub fn from_milli(milli: i64) -> Self {
        Self { nanos: i128::from(milli) * 1_000_000, format: QuantityFormat::DecimalSi }
    }

    /// A number of billionths, printed with decimal suffixes (CPU usage).
    pub fn from_nanos(nanos: i64) -> Self {
        Self { nanos: i128::from(nanos), format: QuantityFormat::DecimalSi }
    }

    /// A number of bytes, printed with binary suffixes (memory and storage).
    pub fn from_bytes(bytes: u64) -> Self {
        Self { nanos: i128::from(bytes) * NANOS, format: QuantityFormat::BinarySi }.clamped()
    }

    /// The amount in whole units, fractions rounded away from zero.
    pub fn value(&self) -> i64 {
        divide_away(self.nanos, NANOS)
    }

    /// The amount in thousandths, finer fractions rounded away from zero; cut to the range of `i64`.
    pub fn milli_value(&self) -> i64 {
        divide_away(self.nanos, 1_000_000)
    }

    /// The exact amount in billionths of a unit.
    pub fn nanos(&self) -> i128 {
        self.nanos
    }

    /// The family of suffixes this amount prints with.
    pub fn format(&self) -> QuantityFormat {
        self.format
    }

    /// True for nothing at all.
    pub fn is_zero(&self) -> bool {
        self.nanos == 0
    }

    /// True below zero.
    pub fn is_negative(&self) -> bool {
        self.nanos < 0
    }

    fn clamped(self) -> Self {
        Self { nanos: self.nanos.clamp(-MAX_NANOS, MAX_NANOS), format: self.format }
    }

    /// The format of a sum or difference: that of the left side, unless it is zero.
    fn joint_format(self, other: Self) -> QuantityFormat {
        if self.is_zero() { other.format } else { self.format }
    }
}

fn parse_suffix(suffix: &str) -> Option<Scale> {
    use QuantityFormat::{BinarySi, DecimalExponent, DecimalSi};
    let decimal = |exponent| Some(Scale { exponent, shift: 0, format: DecimalSi });
    let binary = |shift| Some(Scale { exponent: 0, shift, format: BinarySi });
    match suffix {
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "" => decimal(0),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(10),
        "Mi" => binary(20),
        "Gi" => binary(30),
        "Ti" => binary(40),
        "Pi" => binary(50),
        "Ei" => binary(60),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?;
            Some(Scale { exponent, shift: 0, format: DecimalExponent })
        }
    }
}

/// Billionths of a unit for digits before and after the point, scaled; rounded up, at most [`MAX_NANOS`].
fn magnitude(whole: &str, fraction: &str, scale: &Scale) -> i128 {
    let digits: Vec<u8> = whole.bytes().chain(fraction.bytes()).map(|digit| digit - b'0').collect();
    let Some(first) = digits.iter().position(|digit| *digit != 0) else { return 0 };
    // Position of the decimal point, in digits from the first significant one.
    let digits = &digits[first..];
    let point = whole.len() as i64 - first as i64 + i64::from(scale.exponent);
    if point < -40 {
        return 1; // far below a billionth, but not nothing
    }
    let unit = (1_i128 << scale.shift) * NANOS;
    let digit_at = |place: i64| usize::try_from(place).ok().and_then(|place| digits.get(place)).copied();

    let mut units: i128 = 0;
    for place in 0..point {
        units = units * 10 + i128::from(digit_at(place).unwrap_or(0));
        if units > i128::from(i64::MAX) {
            return MAX_NANOS;
        }
    }
    // From the finest digit to the coarsest: each step divides by ten, and a lost rest is remembered.
    let mut part: i128 = 0;
    let mut inexact = false;
    for place in (point..digits.len() as i64).rev() {
        part += i128::from(digit_at(place).unwrap_or(0)) * unit;
        inexact |= part % 10 != 0;
        part /= 10;
    }
    units.saturating_mul(unit).saturating_add(part + i128::from(inexact)).min(MAX_NANOS)
}

/// Divides, rounds away from zero and cuts to the range of `i64`.
fn divide_away(nanos: i128, by: i128) -> i64 {
    let quotient = (nanos.unsigned_abs().div_ceil(by.unsigned_abs())) as i128;
    let signed = if nanos < 0 { -quotient } else { quotient };
    signed.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        let whole = self.nanos % NANOS == 0;
        let large = self.nanos.abs() >= 1024 * NANOS;
        if self.format == QuantityFormat::BinarySi && whole && large {
            let (mut mantissa, mut step) = (self.nanos / NANOS, 0);
            while mantissa % 1024 == 0 {
                mantissa /= 1024;
                step += 1;
            }
            return write!(f, "{mantissa}{}", ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"][step]);
        }
        // The amount is at most about 2^63 units of 10^9 billionths: nine steps of 1000 at the very most.
        let (mut mantissa, mut step) = (self.nanos, 0_usize);
        while mantissa % 1000 == 0 {
            mantissa /= 1000;
            step += 1;
        }
        if self.format == QuantityFormat::DecimalExponent {
            return match step {
                3 => write!(f, "{mantissa}"),
                _ => write!(f, "{mantissa}e{}", step as i32 * 3 - 9),
            };
        }
        write!(f, "{mantissa}{}", ["n", "u", "m", "", "k", "M", "G", "T", "P", "E"][step])
    }
}

impl FromStr for Quantity {
    type Err = ParseQuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl Hash for Quantity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.nanos.hash(state);
    }
}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl Add for Quantity {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { nanos: self.nanos + other.nanos, format: self.joint_format(other) }.clamped()
    }
}

impl Sub for Quantity {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { nanos: self.nanos - other.nanos, format: self.joint_format(other) }.clamped()
    }
}

impl AddAssign for Quantity {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl SubAssign for Quantity {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Quantity;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity as string or number")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Quantity, E> {
                Quantity::parse(text).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Quantity, E> {
                Ok(Quantity::from_units(number, QuantityFormat::DecimalSi))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Quantity, E> {
                self.visit_str(&number.to_string())
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Quantity, E> {
                self.visit_str(&number.to_string())
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
