//! Only the command-line tool may call init (architecture §2).

#[test]
fn only_the_command_line_tool_may_call_init() {
    let methods: Vec<_> =
        keelson_proto::CALLERS.iter().filter(|(path, _)| path.contains("keelson.supervisor.")).collect();
    assert_eq!(methods.len(), 3, "{methods:?}");
    for (path, callers) in methods {
        assert_eq!(*callers, ["cli"], "{path}");
    }
}
