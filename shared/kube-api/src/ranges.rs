//! Lists and watches of a range of objects.

use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use http::Method;
use kube::core::WatchEvent;
use serde_json::Value;

use crate::calls::within;
use crate::connect::{Connected, KubeApi};
use crate::error::KubeError;
use crate::resource::{Object, Range};

/// Bounds of the timeout of a watch. The server ends the watch then, so that watchers spread over its replicas.
const WATCH_SECONDS: std::ops::Range<u32> = 300..600;
/// Extra time after which the client ends a watch that the server has not ended.
const WATCH_OVERDUE: Duration = Duration::from_secs(30);

impl KubeApi {
    /// Lists a range from the server's watch cache.
    ///
    /// # Errors
    /// The server does not answer or refuses.
    pub async fn list(&self, range: &Range) -> Result<Vec<Object>, KubeError> {
        Ok(self.page(range, &Page::NotOlderThan("0")).await?.objects)
    }

    /// A page of a range: the objects, the version of the list, and the token of the next page.
    pub(crate) async fn page(&self, range: &Range, page: &Page<'_>) -> Result<Listed, KubeError> {
        let path = range.path(|query| page.add_to(query));
        let mut list = self.call(Method::GET, &path, range.resource.plural, None).await?;
        let (server, metadata) = (self.server(), list["metadata"].take());
        let text = |field: &str| metadata[field].as_str().unwrap_or_default().to_owned();
        let (version, next) = (text("resourceVersion"), text("continue"));
        let Value::Array(items) = list["items"].take() else {
            // A list without items is sent as null.
            let is_list = list["kind"].as_str().is_some_and(|kind| kind.ends_with("List"));
            let empty = Listed { objects: Vec::new(), version, next };
            let wrong = || KubeError::unreachable(&server, range.resource.plural, "the answer is no list");
            return if is_list { Ok(empty) } else { Err(wrong()) };
        };
        Ok(Listed { objects: items.into_iter().map(Object).collect(), version, next })
    }

    /// Watches a range from a version on; returns when the server has answered. The second value is the connection's number.
    pub(crate) async fn watch(&self, range: &Range, version: &str) -> Result<(Events, u64), KubeError> {
        let seconds = fastrand::u32(WATCH_SECONDS);
        let path = range.path(|query| {
            query.append_pair("watch", "1");
            query.append_pair("allowWatchBookmarks", "true");
            query.append_pair("resourceVersion", version);
            query.append_pair("timeoutSeconds", &seconds.to_string());
        });
        self.keep_looking();
        let Connected { watches, server, number, host, credential, .. } = self.connected().await?;
        self.take_turn("GET", &host).await;
        let what = format!("a watch of {}", range.resource.plural);
        let request = self.request(Method::GET, &path, &server, &what, None)?;
        let (client, slot) =
            watches.acquire().map_err(|message| KubeError::unreachable(&server, &what, message))?;
        let events = match within(&server, &what, client.request_events::<Value>(request)).await {
            Ok(events) => events,
            Err(error) => {
                if error.is_unanswered() {
                    watches.mark_full(&slot);
                }
                self.report_refusal(&error, credential.as_deref());
                return Err(error);
            }
        };
        let events = events.map(move |event| {
            // The place is held as long as the stream exists.
            let _slot = &slot;
            event.map_err(|error| KubeError::of(&server, &what, error))
        });
        let ends = Duration::from_secs(seconds.into()) + WATCH_OVERDUE;
        Ok((Box::pin(events.take_until(tokio::time::sleep(ends))), number))
    }
}

/// The part of a list to request.
#[derive(Debug)]
pub(crate) enum Page<'a> {
    /// The whole list, not older than a version; `0`: any version in the server's cache.
    NotOlderThan(&'a str),
    /// A page of a consistent list, by its token; `None`: the first page.
    Now(Option<&'a str>),
}

impl Page<'_> {
    /// The number of objects in a page.
    const LIMIT: &'static str = "500";

    fn add_to(&self, query: &mut Query) {
        match self {
            Self::NotOlderThan(version) => {
                query.append_pair("resourceVersion", version);
            }
            Self::Now(next) => {
                query.append_pair("limit", Self::LIMIT);
                if let Some(next) = next {
                    query.append_pair("continue", next);
                }
            }
        }
    }
}

/// A page of a list.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) objects: Vec<Object>,
    pub(crate) version: String,
    /// The token of the next page; empty after the last one.
    pub(crate) next: String,
}

/// The events of a watch.
pub(crate) type Events = BoxStream<'static, Result<WatchEvent<Value>, KubeError>>;

type Query = form_urlencoded::Serializer<'static, String>;

impl Range {
    /// The path of the range; `more` is added to the query.
    fn path(&self, more: impl FnOnce(&mut Query)) -> String {
        let mut query = form_urlencoded::Serializer::new(String::new());
        if let Some(fields) = &self.fields {
            query.append_pair("fieldSelector", fields);
        }
        more(&mut query);
        format!("{}?{}", self.resource.path(self.namespace.as_deref()), query.finish())
    }
}
