//! Shared code of the tests of the protos.

use prost_reflect::DescriptorPool;

/// The descriptors of all our APIs.
pub fn pool() -> DescriptorPool {
    use keelson_proto::descriptors as d;
    let mut pool = DescriptorPool::new();
    for set in [
        d::ADMIN,
        d::EVENTS,
        d::SUPERVISOR,
        d::POD_CONFIG,
        d::RUNTIME,
        d::VOLUME_MANAGER,
        d::RESOURCE_MANAGER,
        d::POD_SYNC,
        d::NODE_STATUS,
    ] {
        pool.decode_file_descriptor_set(set).expect("the build has written a valid descriptor set");
    }
    pool
}

/// Whether to write the generated files instead of comparing them.
pub fn writes() -> bool {
    std::env::var_os("KEELSON_WRITE").is_some()
}
