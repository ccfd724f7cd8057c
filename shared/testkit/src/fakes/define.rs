//! Defines fakes: each has a field and a method of the generated trait for every gRPC method.

/// Defines a fake: its methods by kind, and the generated trait that it implements.
macro_rules! fake_service {
    (
        $(#[$meta:meta])*
        $fake:ident implements $service:ident, served by $server:ident:
        unary { $($unary:ident($unary_request:ty) -> $unary_response:ty;)* }
        streams { $($stream:ident as $stream_type:ident($stream_request:ty) -> $stream_item:ty;)* }
        bidi { $($bidi:ident as $bidi_type:ident($bidi_request:ty) -> $bidi_item:ty;)* }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone)]
        pub struct $fake {
            /// The names of the methods that were called, in order.
            pub calls: crate::fakes::Recorder<&'static str>,
            $(
                #[doc = concat!("The method `", stringify!($unary), "`.")]
                pub $unary: crate::fakes::Unary<$unary_request, $unary_response>,
            )*
            $(
                #[doc = concat!("The method `", stringify!($stream), "`.")]
                pub $stream: crate::fakes::ServerStream<$stream_request, $stream_item>,
            )*
            $(
                #[doc = concat!("The method `", stringify!($bidi), "`.")]
                pub $bidi: crate::fakes::Bidi<$bidi_request, $bidi_item>,
            )*
        }

        impl Default for $fake {
            fn default() -> Self {
                Self {
                    calls: crate::fakes::Recorder::default(),
                    $($unary: crate::fakes::Unary::new(concat!(stringify!($service), ".", stringify!($unary))),)*
                    $($stream: crate::fakes::ServerStream::new(concat!(stringify!($service), ".", stringify!($stream))),)*
                    $($bidi: crate::fakes::Bidi::new(concat!(stringify!($service), ".", stringify!($bidi))),)*
                }
            }
        }

        impl $fake {
            /// The tonic service, for routes.
            pub fn server(&self) -> $server<Self> {
                $server::new(self.clone())
            }
        }

        #[tonic::async_trait]
        impl $service for $fake {
            $(type $stream_type = crate::fakes::MessageStream<$stream_item>;)*
            $(type $bidi_type = crate::fakes::MessageStream<$bidi_item>;)*

            $(
                async fn $unary(
                    &self,
                    request: tonic::Request<$unary_request>,
                ) -> Result<tonic::Response<$unary_response>, tonic::Status> {
                    self.calls.record(stringify!($unary));
                    self.$unary.call(request).await
                }
            )*
            $(
                async fn $stream(
                    &self,
                    request: tonic::Request<$stream_request>,
                ) -> Result<tonic::Response<crate::fakes::MessageStream<$stream_item>>, tonic::Status> {
                    self.calls.record(stringify!($stream));
                    self.$stream.call(request).await
                }
            )*
            $(
                async fn $bidi(
                    &self,
                    request: tonic::Request<tonic::Streaming<$bidi_request>>,
                ) -> Result<tonic::Response<crate::fakes::MessageStream<$bidi_item>>, tonic::Status> {
                    self.calls.record(stringify!($bidi));
                    self.$bidi.call(request).await
                }
            )*
        }
    };
}
pub(super) use fake_service;
