//! Which claims are in use.

use super::*;

/// `a` is bound to `c`, and `b` was bound to `gone`, which is released.
fn known() -> Bindings {
    let plain = json!({});
    let mut bindings =
        decide(&[volume("a", "1Gi", &plain), claim("c", "1Gi", &plain)], &Bindings::new()).bindings;
    let mut released = bindings["a"].clone();
    released.released = true;
    released.claim.name = "gone".into();
    bindings.insert("b".into(), released);
    bindings
}

fn report(claims: &[&str], volumes: &[&str]) -> Reports {
    let user = |name: &&str| format!("user of {name}");
    Reports::Known(Report {
        claims: claims.iter().map(|name| (key(name), user(name))).collect(),
        volumes: volumes.iter().map(|name| ((*name).to_owned(), user(name))).collect(),
    })
}

#[test]
fn a_claim_is_held_by_what_is_mounted_or_by_a_pod_that_names_it() {
    let reported = |name: &str| Holder::Reported(format!("user of {name}"));
    for (pods, reports, expected) in [
        (&[][..], Reports::Never, vec![]),
        (&["c"], Reports::Never, vec![("c", Holder::DesiredPod)]),
        (&[], Reports::Awaited, vec![("c", Holder::NotReported)]),
        (&["d"], Reports::Awaited, vec![("c", Holder::NotReported), ("d", Holder::DesiredPod)]),
        (&[], report(&[], &[]), vec![]),
        (&["c"], report(&[], &[]), vec![("c", Holder::DesiredPod)]),
        (&["c"], report(&["c"], &[]), vec![("c", reported("c"))]),
        (&[], report(&["d"], &[]), vec![("d", reported("d"))]),
        (&[], report(&[], &["a"]), vec![("c", reported("a"))]),
        (&[], report(&["c"], &["a"]), vec![("c", reported("c"))]),
        (&[], report(&[], &["b", "unknown"]), vec![]),
    ] {
        let pods: BTreeSet<ClaimKey> = pods.iter().map(|name| key(name)).collect();
        let expected: BTreeMap<ClaimKey, Holder> =
            expected.into_iter().map(|(name, holder)| (key(name), holder)).collect();
        assert_eq!(holders(&pods, &reports, &known()), expected, "{pods:?} {reports:?}");
    }
}

#[test]
fn the_text_of_a_holder_names_who_has_to_act() {
    for (holder, text) in [
        (Holder::DesiredPod, "a pod of this node that names it"),
        (Holder::Reported("the pod default/db".into()), "the pod default/db"),
        (Holder::NotReported, "volume-manager, which has not reported yet what it has mounted"),
    ] {
        assert_eq!(holder.to_string(), text);
    }
}
