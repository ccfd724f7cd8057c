//! Quantities: parsing, canonical text, rounding, arithmetic.
#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may unwrap too

use keelson_kube_model::quantity::{ParseQuantityError, Quantity, QuantityFormat};
use keelson_testkit::Reached;
use proptest::prelude::*;

fn q(text: &str) -> Quantity {
    Quantity::parse(text).unwrap()
}

#[test]
fn every_suffix_has_its_value() {
    let decimal = |exponent: u32| 10_i128.pow(exponent);
    for (text, nanos) in [
        ("1n", decimal(0)),
        ("1u", decimal(3)),
        ("1m", decimal(6)),
        ("1", decimal(9)),
        ("1k", decimal(12)),
        ("1M", decimal(15)),
        ("1G", decimal(18)),
        ("1T", decimal(21)),
        ("1P", decimal(24)),
        ("1E", decimal(27)),
        ("1Ki", decimal(9) << 10),
        ("1Mi", decimal(9) << 20),
        ("1Gi", decimal(9) << 30),
        ("1Ti", decimal(9) << 40),
        ("1Pi", decimal(9) << 50),
        ("1Ei", decimal(9) << 60),
    ] {
        assert_eq!(q(text).nanos(), nanos, "{text}");
    }
}

#[test]
fn canonical_text_keeps_the_family_of_suffixes() {
    let table = [
        ("0", "0"),
        ("0Gi", "0"),
        ("-0", "0"),
        ("1", "1"),
        ("+1", "1"),
        ("1000", "1k"),
        ("1500", "1500"),
        ("1.5k", "1500"),
        ("0.5", "500m"),
        (".5", "500m"),
        ("5.", "5"),
        ("100m", "100m"),
        ("1000m", "1"),
        ("2500m", "2500m"),
        ("1u", "1u"),
        ("1n", "1n"),
        ("1Gi", "1Gi"),
        ("1024Mi", "1Gi"),
        ("1.5Gi", "1536Mi"),
        ("512", "512"),
        ("1024", "1024"),
        ("0.5Ki", "512"),
        ("1.1Ki", "1126400m"),
        ("0.0001Ki", "102400u"),
        ("1e3", "1e3"),
        ("1E3", "1e3"),
        ("1e0", "1"),
        ("12e-3", "12e-3"),
        ("1E", "1E"),
        ("2Ei", "2Ei"),
        ("-1.5", "-1500m"),
        ("-2Ki", "-2Ki"),
        ("128974848", "128974848"),
        ("129e6", "129e6"),
        ("123Mi", "123Mi"),
        ("100000Ei", "9223372036854775807"),
        ("1e100", "9223372036854775807"),
        ("1e-100", "1e-9"),
        ("1e-2000000000", "1e-9"),
        ("1e2000000000", "9223372036854775807"),
        ("9223372036854775806", "9223372036854775806"),
        ("9223372036854775808", "9223372036854775807"),
        ("1.0000000001", "1000000001n"),
        ("0.00000000000000000000000000000000000000000000000000000000001", "1n"),
    ];
    for (text, canonical) in table {
        assert_eq!(q(text).to_string(), canonical, "{text}");
    }
}

#[test]
fn refused_text_is_named_in_the_error() {
    assert_eq!(Quantity::parse(""), Err(ParseQuantityError::Empty));
    for text in
        ["abc", "-", ".", "1..2", " 1", "1 Gi", "1gi", "1K", "1e", "1e1.5", "1.2.3", "Gi", "0x10", "1é"]
    {
        let error = Quantity::parse(text).unwrap_err();
        assert!(error.to_string().contains(text), "{text}: {error}");
    }
}

#[test]
fn values_are_rounded_away_from_zero() {
    let table = [
        ("1", 1, 1000),
        ("1m", 1, 1),
        ("1n", 1, 1),
        ("1001m", 2, 1001),
        ("-1m", -1, -1),
        ("1Ki", 1024, 1_024_000),
    ];
    for (text, value, milli) in table {
        assert_eq!((q(text).value(), q(text).milli_value()), (value, milli), "{text}");
    }
    assert_eq!(q("9E").milli_value(), i64::MAX);
}

#[test]
fn sums_take_the_format_of_the_first_amount_that_is_not_zero() {
    assert_eq!((q("1Gi") + q("1Gi")).to_string(), "2Gi");
    assert_eq!((Quantity::ZERO + q("2Gi")).to_string(), "2Gi");
    assert_eq!((q("1500m") + q("500m")).to_string(), "2");
    assert_eq!((q("1Gi") - q("1Gi")).to_string(), "0");
    assert_eq!((q("1") - q("2")).to_string(), "-1");
}

#[test]
fn binary_suffixes_are_forgotten_below_one_and_not_printed_below_1024() {
    use QuantityFormat::{BinarySi, DecimalExponent, DecimalSi};
    for (text, format) in [
        ("1Ki", BinarySi),
        // Exactly one.
        ("0.0009765625Ki", BinarySi),
        ("0.0009765624Ki", DecimalSi),
        ("-0.0001Ki", DecimalSi),
        ("0Ki", BinarySi),
        ("1", DecimalSi),
        ("1e3", DecimalExponent),
    ] {
        assert_eq!(q(text).format(), format, "{text}");
    }
    for (bytes, text) in [(1000, "1k"), (1023, "1023"), (1024, "1Ki"), (2000, "2000")] {
        assert_eq!(Quantity::from_bytes(bytes).to_string(), text);
    }
}

#[test]
fn only_amounts_below_zero_are_negative() {
    for (text, negative) in [("-1n", true), ("0", false), ("-0", false), ("1n", false)] {
        assert_eq!(q(text).is_negative(), negative, "{text}");
    }
}

#[test]
fn amounts_are_subtracted_in_place() {
    let mut left = q("3Gi");
    left -= q("1Gi");
    assert_eq!(left, q("2Gi"));
}

#[test]
fn equal_amounts_have_the_same_hash_and_others_another() {
    let hash = |text| {
        use std::hash::{DefaultHasher, Hash as _, Hasher as _};
        let mut hasher = DefaultHasher::new();
        q(text).hash(&mut hasher);
        hasher.finish()
    };
    assert_eq!(hash("1Ki"), hash("1024"));
    assert_ne!(hash("1Ki"), hash("1k"));
}

#[test]
fn equal_amounts_are_equal_however_they_are_written() {
    assert_eq!(q("1Ki"), q("1024"));
    assert_eq!(q("0.1"), q("100m"));
    assert!(q("1G") < q("1Gi"));
}

#[test]
fn json_numbers_are_read_and_text_is_written() {
    let read = |text| serde_json::from_str::<Quantity>(text).unwrap();
    assert_eq!(read("2"), q("2"));
    assert_eq!(read("0.5"), q("500m"));
    assert_eq!(read("-3"), q("-3"));
    assert_eq!(read("\"1Gi\""), q("1Gi"));
    assert_eq!(serde_json::to_string(&q("1Gi")).unwrap(), "\"1Gi\"");
    assert!(serde_json::from_str::<Quantity>("\"x\"").is_err());
    let error = serde_json::from_str::<Quantity>("true").unwrap_err().to_string();
    assert!(error.contains("expected a quantity as string or number"), "{error}");
    assert_eq!("1Gi".parse(), Ok(q("1Gi")));
}

#[test]
fn constructors_print_as_their_resource_does() {
    assert_eq!(Quantity::from_bytes(2 << 30).to_string(), "2Gi");
    assert_eq!(Quantity::from_milli(250).to_string(), "250m");
    assert_eq!(Quantity::from_units(3, QuantityFormat::DecimalSi).to_string(), "3");
    assert_eq!(Quantity::from_bytes(u64::MAX).value(), i64::MAX);
    assert_eq!(Quantity::from_nanos(250).to_string(), "250n");
    assert_eq!((q("1").nanos(), q("-250n").nanos()), (1_000_000_000, -250));
}

#[test]
fn canonical_text_reads_back_as_the_same_amount() {
    let reached = &Reached::default();
    let (whole, sign) = (prop_oneof![Just(0), 0u64..1_000_000_000_000], "[-+]?");
    let fraction = prop_oneof!["", "[0-9]{0,12}", "0{1,11}[0-9]{1,2}"];
    let suffix = "|n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|e-?[0-9]|E-?[0-9]";
    proptest!(
        ProptestConfig::with_cases(4096),
        |(whole in whole, fraction in fraction, sign in sign, suffix in suffix)| {
            let text = format!("{sign}{whole}.{fraction}{suffix}");
            let parsed = q(&text);
            let canonical = parsed.to_string();
            let again = q(&canonical);
            prop_assert_eq!(again, parsed, "{} -> {}", text, canonical);
            prop_assert_eq!(&again.to_string(), &canonical);
            let magnitude = parsed.nanos().abs();
            let below_one = magnitude > 0 && magnitude < 1_000_000_000;
            let largest = i128::from(i64::MAX) * 1_000_000_000;
            reached.case([
                ("nothing", parsed.is_zero()),
                ("below zero", parsed.is_negative()),
                ("cut to the largest", magnitude == largest),
                ("billionths", canonical.ends_with('n')),
                ("binary suffix", canonical.ends_with('i')),
                ("binary suffix, less than one", suffix.ends_with('i') && below_one),
                ("exponent", canonical.contains('e')),
            ]);
        }
    );
    // The rarest: "binary suffix, less than one", in one case of 64.
    reached.assert_each();
}

#[test]
fn any_text_is_parsed_or_refused_without_panic() {
    let reached = &Reached::default();
    // A text of chance is hardly ever an amount.
    let text = prop_oneof![".{0,24}", "[-+]?[0-9.]{0,6}[numkKMGTPEie0-9+-]{0,3}"];
    proptest!(ProptestConfig::with_cases(2048), |(text in text)| {
        let parsed = Quantity::parse(&text);
        reached.case([
            ("an amount", parsed.is_ok()),
            ("no text", matches!(parsed, Err(ParseQuantityError::Empty))),
            ("no number", matches!(parsed, Err(ParseQuantityError::Number { .. }))),
            ("another suffix", matches!(parsed, Err(ParseQuantityError::Suffix { .. }))),
        ]);
    });
    // The rarest: "no text", in one case of 36.
    reached.assert_each();
}

#[test]
fn subtraction_undoes_addition() {
    let reached = &Reached::default();
    let some = -1_000_000_000i64..1_000_000_000;
    proptest!(ProptestConfig::with_cases(512), |(a in some.clone(), b in some)| {
        let (a, b) = (Quantity::from_milli(a), Quantity::from_milli(b));
        prop_assert_eq!(a + b - b, a);
        reached.case([
            ("both above zero", !a.is_negative() && !b.is_negative()),
            ("both below zero", a.is_negative() && b.is_negative()),
            ("the sum turns the sign", a.is_negative() != (a + b).is_negative()),
        ]);
    });
    // The rarest: "both above zero", in one case of 4.
    reached.assert_each();
}
