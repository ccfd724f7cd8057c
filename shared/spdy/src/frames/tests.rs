use keelson_testkit::Reached;
use proptest::prelude::*;

use super::*;

/// Decodes `bytes` in pieces of `step`; adjacent data of a stream is joined.
fn events(bytes: &[u8], step: usize) -> Result<Vec<Event>, SpdyError> {
    let (mut decoder, mut input, mut found) = (Decoder::default(), BytesMut::new(), Vec::new());
    for piece in bytes.chunks(step) {
        input.extend_from_slice(piece);
        while let Some(event) = decoder.next(&mut input)? {
            match (found.last_mut(), event) {
                (Some(Event::Data { stream, bytes }), Event::Data { stream: next, bytes: more })
                    if *stream == next =>
                {
                    *bytes = [bytes.as_ref(), more.as_ref()].concat().into();
                }
                (_, event) => found.push(event),
            }
        }
    }
    Ok(found)
}

fn data(stream: u32, bytes: &[u8], last: bool) -> Vec<u8> {
    [&data_head(stream, bytes.len(), last), bytes].concat()
}

fn of_kind(kind: u16, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = control(kind, payload);
    frame[4] = flags;
    frame
}

/// The headers in a frame that opens a stream, read as a zlib stream of stored blocks (RFC 1950, 1951).
fn headers(frame: &[u8], first: bool) -> Vec<u8> {
    let mut block = &frame[HEAD + 10..];
    if first {
        let (begin, rest) = block.split_at(6);
        assert_eq!(u16::from_be_bytes([begin[0], begin[1]]) % 31, 0, "the check bits of the zlib header");
        assert_eq!((begin[0] & 0x0f, begin[1] & 0x20), (8, 0x20), "deflate, with a dictionary");
        block = rest;
    }
    let mut text = Vec::new();
    while !block.is_empty() {
        assert_eq!(block.get_u8(), 0, "a stored block that is not the last");
        let length = block.get_u16_le();
        assert_eq!(block.get_u16_le(), !length);
        text.extend(&block[..usize::from(length)]);
        block.advance(usize::from(length));
    }
    text
}

#[test]
fn stream_is_opened_with_its_header_in_one_zlib_stream() {
    let mut opener = Opener::default();
    let wanted = b"\0\0\0\x01\0\0\0\x0astreamtype\0\0\0\x05stdin";
    for (stream, first) in [(1, true), (3, false)] {
        let frame = opener.open(stream, &[("streamtype", "stdin")]);
        assert_eq!(frame[..4], [0x80, 3, 0, 1], "SYN_STREAM of version 3");
        assert_eq!(frame[4], 0, "no end yet");
        let length = u32::from_be_bytes([0, frame[5], frame[6], frame[7]]);
        assert_eq!(length as usize, frame.len() - HEAD);
        assert_eq!(frame[8..12], stream.to_be_bytes());
        assert_eq!(headers(&frame, first), wanted);
        assert_eq!(frame[frame.len() - 5..], ZLIB_FLUSH, "a reader has all of it");
    }
}

#[test]
fn frames_are_decoded_from_pieces_of_any_size() {
    let bytes = [
        of_kind(SYN_REPLY, 0, &[0, 0, 0, 1, 9, 9, 9]),
        data(1, b"hello", false),
        data(3, b"", false),
        data(1, b" world", true),
        ping(2),
        // A server's own stream, more headers, settings and a window: this client ignores them.
        of_kind(SYN_STREAM, 0, &[0; 10]),
        of_kind(HEADERS, 0, &[0, 0, 0, 9]),
        of_kind(4, 0, &[0; 4]),
        of_kind(9, 0, &[0; 8]),
        of_kind(SYN_REPLY, FIN, &[0, 0, 0, 5]),
        of_kind(HEADERS, FIN, &[0, 0, 0, 7]),
        of_kind(RST_STREAM, 0, &[0, 0, 0, 3, 0, 0, 0, 5]),
        of_kind(GOAWAY, 0, &[0; 8]),
    ]
    .concat();
    let wanted = [
        Event::Taken { stream: 1 },
        Event::Data { stream: 1, bytes: Bytes::from_static(b"hello world") },
        Event::Ended { stream: 1 },
        Event::Ping { id: 2 },
        Event::Taken { stream: 5 },
        Event::Ended { stream: 5 },
        Event::Ended { stream: 7 },
        Event::Reset { stream: 3, status: 5 },
        Event::GoAway,
    ];
    for step in 1..=bytes.len() {
        assert_eq!(events(&bytes, step).unwrap(), wanted, "in pieces of {step}");
    }
}

#[test]
fn bytes_that_are_not_spdy_are_an_error() {
    let http = b"HTTP/1.1 400 Bad Request\r\n";
    let other_version = [0x80, 2, 0, 6, 0, 0, 0, 4, 0, 0, 0, 2];
    let long = head(CONTROL | (3 << 16) | u32::from(PING), 0, LONGEST_CONTROL + 1);
    for (bytes, error) in [
        (&other_version[..], SpdyError::Version(2)),
        (&long[..], SpdyError::TooLong(LONGEST_CONTROL + 1)),
        (&of_kind(RST_STREAM, 0, &[0, 0, 0, 1])[..], SpdyError::TooShort { kind: RST_STREAM, length: 4 }),
        (&data(0, b"x", false)[..], SpdyError::NoStream),
    ] {
        assert_eq!(events(bytes, 7), Err(error));
    }
    // Text looks like the data of a stream with a high id, which the reader has not opened.
    let Event::Data { stream, .. } = events(http, 99).unwrap().remove(0) else { panic!("data") };
    assert!(stream > 0x4000_0000, "{stream}");
}

#[test]
fn control_frame_of_the_maximum_length_is_accepted() {
    let frame = control(PING, &[7; LONGEST_CONTROL]);
    assert_eq!(events(&frame, frame.len()), Ok(vec![Event::Ping { id: 0x0707_0707 }]));
}

#[test]
fn the_longest_frame_fills_the_24_bits_of_its_length() {
    assert_eq!(data_head(1, 0xff_ffff, true), [0, 0, 0, 1, FIN, 0xff, 0xff, 0xff]);
}

#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "data is cut into frames before"))]
fn data_longer_than_a_frame_panics() {
    let _ = data_head(1, 1 << 24, false);
}

#[test]
fn data_is_delivered_before_its_frame_is_complete() {
    let (mut decoder, mut input) = (Decoder::default(), BytesMut::from(&data_head(1, 1 << 20, false)[..]));
    input.extend_from_slice(&[7; 100]);
    let event = decoder.next(&mut input).unwrap();
    assert_eq!(event, Some(Event::Data { stream: 1, bytes: Bytes::from(vec![7; 100]) }));
    assert_eq!((decoder.next(&mut input), input.len()), (Ok(None), 0));
}

#[test]
fn decoder_never_panics_or_buffers_much() {
    let reached = &Reached::default();
    let byte = prop_oneof![Just(0_u8), Just(3), Just(0x80), any::<u8>()];
    let bytes = prop::collection::vec(byte, 0..200);
    // Begins like a frame: a control frame of any kind or data of a stream, with flags and few bytes.
    let begins = (any::<bool>(), 0_u8..12, 0_u8..3, 0_u8..16).prop_map(|(control, kind, flags, length)| {
        if control { [0x80, 3, 0, kind, flags, 0, 0, length] } else { [0, 0, 0, kind, flags, 0, 0, length] }
    });
    let (begins, step) = (prop::option::of(begins), 1_usize..50);
    proptest!(ProptestConfig::with_cases(4096), |(begins in begins, bytes in bytes, step in step)| {
        let bytes: Vec<u8> = begins.into_iter().flatten().chain(bytes).collect();
        let (mut decoder, mut input) = (Decoder::default(), BytesMut::new());
        let (mut events, mut error) = (Vec::new(), None);
        'pieces: for piece in bytes.chunks(step) {
            input.extend_from_slice(piece);
            loop {
                match decoder.next(&mut input) {
                    Ok(Some(event)) => events.push(event),
                    Ok(None) => break,
                    Err(found) => {
                        error = Some(found);
                        break 'pieces;
                    }
                }
            }
            prop_assert!(input.len() < HEAD + LONGEST_CONTROL);
        }
        reached.case([
            ("data", events.iter().any(|event| matches!(event, Event::Data { .. }))),
            ("a control frame", events.iter().any(|event| !matches!(event, Event::Data { .. }))),
            ("the rest is awaited", error.is_none() && !input.is_empty()),
            ("another version", matches!(error, Some(SpdyError::Version(_)))),
            ("a control frame too long", matches!(error, Some(SpdyError::TooLong(_)))),
            ("a control frame too short", matches!(error, Some(SpdyError::TooShort { .. }))),
            ("data of no stream", error == Some(SpdyError::NoStream)),
        ]);
    });
    // The rarest: "a control frame too short", in one case of 52.
    reached.assert_each();
}

#[test]
fn data_round_trips() {
    let reached = &Reached::default();
    let chunks = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8);
    proptest!(ProptestConfig::with_cases(512), |(chunks in chunks, step in 1_usize..400)| {
        let bytes: Vec<u8> = chunks.iter().flat_map(|chunk| data(5, chunk, false)).collect();
        let mut found = Vec::new();
        for event in events(&bytes, step).unwrap() {
            match event {
                Event::Data { stream: 5, bytes } => found.extend(bytes),
                other => prop_assert!(false, "{other:?}"),
            }
        }
        prop_assert_eq!(found, chunks.concat());
        let starts = chunks.iter().scan(0, |at, chunk| Some(std::mem::replace(at, *at + HEAD + chunk.len())));
        let heads: Vec<usize> = starts.collect();
        reached.case([
            ("nothing", chunks.is_empty()),
            ("a head in two pieces", heads.iter().any(|at| at / step != (at + HEAD - 1) / step)),
            ("two heads in a piece", heads.windows(2).any(|at| at[0] / step == (at[1] + HEAD - 1) / step)),
            ("data in several pieces", chunks.iter().any(|chunk| chunk.len() > step)),
        ]);
    });
    // The rarest: "nothing", in one case of 9.
    reached.assert_each();
}
