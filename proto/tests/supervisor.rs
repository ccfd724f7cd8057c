//! Who may ask init (architecture §2: no arrow leads to it but the person's).

#[test]
fn only_the_persons_tool_calls_init() {
    let methods: Vec<_> =
        keelson_proto::CALLERS.iter().filter(|(path, _)| path.contains("keelson.supervisor.")).collect();
    assert_eq!(methods.len(), 3, "{methods:?}");
    for (path, callers) in methods {
        assert_eq!(*callers, ["cli"], "{path}");
    }
}
