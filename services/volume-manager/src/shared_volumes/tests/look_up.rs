//! The plugins of the folders that are found at startup.

use super::*;

#[tokio::test]
async fn the_folder_of_a_driver_is_looked_up_on_a_thread_that_may_block() {
    let plugin = FakePlugin::new(Shape::PerPod);
    let plugins = Plugins::new(vec![Arc::clone(&plugin) as Arc<dyn Plugin>]);
    let folders = ["example.org~driver", "example.org~other"].map(|name| PluginFolder {
        plugin: name.into(),
        folder: FoundFolder { pod: "a".into(), inner_name: name.into(), is_block: false },
    });
    find_volumes(&plugins, folders.into()).await;
    assert_eq!(*plugin.calls.borrow(), ["reconstruct example.org~driver"]);
    let threads = plugin.looked_up_on.lock().unwrap().clone();
    assert!(threads.len() == 2 && !threads.contains(&std::thread::current().id()), "{threads:?}");
}
