//! What the tests of the protos share.

use prost_reflect::DescriptorPool;

/// Every API of ours.
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
        pool.decode_file_descriptor_set(set).expect("what the build has written can be read");
    }
    pool
}

/// Whether the file at `path` is to be written anew instead of compared.
pub fn writes() -> bool {
    std::env::var_os("KEELSON_WRITE").is_some()
}
