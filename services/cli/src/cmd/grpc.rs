//! `keelson grpc`: calls any method of any service, for developers who use the APIs.
//!
//! Messages are in protobuf's JSON mapping, with one exception: a bytes field that holds JSON (`*_json`, such as a whole Pod) is
//! shown and accepted as that JSON instead of base64.

use std::io::Read as _;

use futures_util::stream;
use http::uri::PathAndQuery;
use keelson_config::ServiceName;
use keelson_kube_model::base64;
use keelson_proto::{CALLERS, descriptors};
use prost::Message as _;
use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor,
    ReflectMessage as _, SerializeOptions, ServiceDescriptor,
};
use serde_json::Value;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Request, Status};

use crate::args::{GrpcCallArgs, GrpcListArgs};
use crate::error::CliError;
use crate::output;
use crate::session::Session;
use crate::suggest::similar_names;
use crate::table::Table;

/// The API of a service in addition to those that all have; node-api has none.
fn own_api(service: ServiceName) -> Option<&'static str> {
    match service {
        ServiceName::Init => Some("keelson.supervisor.v1.Supervisor"),
        ServiceName::PodConfig => Some("keelson.pod_config.v1.PodConfig"),
        ServiceName::PodSync => Some("keelson.pod_sync.v1.PodSync"),
        ServiceName::RuntimeShim => Some("keelson.runtime.v1.Runtime"),
        ServiceName::VolumeManager => Some("keelson.volume_manager.v1.VolumeManager"),
        ServiceName::ResourceManager => Some("keelson.resource_manager.v1.ResourceManager"),
        ServiceName::NodeStatus => Some("keelson.node_status.v1.NodeStatus"),
        ServiceName::NodeApi => None,
    }
}

/// The name in the list for all services together.
const ALL_SERVICES: &str = "each";

/// The APIs that every service has.
const COMMON_APIS: [&str; 2] = ["keelson.admin.v1.Admin", "keelson.events.v1.Events"];

fn pool() -> Result<DescriptorPool, CliError> {
    let mut pool = DescriptorPool::new();
    for set in [
        descriptors::ADMIN,
        descriptors::EVENTS,
        descriptors::SUPERVISOR,
        descriptors::POD_CONFIG,
        descriptors::RUNTIME,
        descriptors::VOLUME_MANAGER,
        descriptors::RESOURCE_MANAGER,
        descriptors::POD_SYNC,
        descriptors::NODE_STATUS,
    ] {
        pool.decode_file_descriptor_set(set).map_err(|e| CliError::Encode { reason: e.to_string() })?;
    }
    Ok(pool)
}

/// The APIs of a service, its own first.
fn apis(pool: &DescriptorPool, service: ServiceName) -> Vec<ServiceDescriptor> {
    let names = own_api(service).into_iter().chain(COMMON_APIS);
    names.filter_map(|name| pool.get_service_by_name(name)).collect()
}

/// Shows the methods of all services, or of one.
pub(crate) fn list(args: &GrpcListArgs) -> Result<(), CliError> {
    output::print(&methods(&pool()?, args.service).render(0))
}

/// The methods of a service, or of all; those that every service has are listed once, at the end.
fn methods(pool: &DescriptorPool, service: Option<ServiceName>) -> Table {
    let mut table = Table::new(["SERVICE", "METHOD", "REQUEST", "ANSWER", "CALLERS"]);
    let mut rows = |service: &str, api: &ServiceDescriptor| {
        for method in api.methods() {
            table.row(vec![
                service.to_owned(),
                method.name().to_owned(),
                shape(&method.input(), method.is_client_streaming()),
                shape(&method.output(), method.is_server_streaming()),
                callers(&method),
            ]);
        }
    };
    match service {
        Some(service) => apis(pool, service).iter().for_each(|api| rows(service.as_str(), api)),
        None => {
            for service in ServiceName::ALL {
                let own = own_api(service).and_then(|name| pool.get_service_by_name(name));
                own.iter().for_each(|api| rows(service.as_str(), api));
            }
            let common_apis = COMMON_APIS.iter().filter_map(|name| pool.get_service_by_name(name));
            common_apis.for_each(|api| rows(ALL_SERVICES, &api));
            for service in ServiceName::ALL.into_iter().filter(|service| own_api(*service).is_none()) {
                table.row(vec![service.to_string(), format!("those of {ALL_SERVICES}")]);
            }
        }
    }
    table
}

fn shape(message: &MessageDescriptor, is_stream: bool) -> String {
    format!("{}{}", if is_stream { "stream " } else { "" }, message.name())
}

fn path_of(method: &MethodDescriptor) -> String {
    format!("/{}/{}", method.parent_service().full_name(), method.name())
}

fn callers(method: &MethodDescriptor) -> String {
    let path = path_of(method);
    let known = CALLERS.iter().find(|(known, _)| *known == path);
    known.map_or_else(String::new, |(_, names)| names.join(", "))
}

/// Calls a method and prints each answer on its own line.
pub(crate) async fn call(session: &Session, args: &GrpcCallArgs) -> Result<(), CliError> {
    let pool = pool()?;
    let method = find(&pool, args)?;
    let messages = requests(&method, &text(&args.message)?)?;
    let path: PathAndQuery =
        path_of(&method).parse().map_err(|_| CliError::Encode { reason: path_of(&method) })?;
    let to_error = |status| session.agent.call_error(args.service, status);
    // The same limit as in the generated clients.
    let mut client = tonic::client::Grpc::new(session.agent.channel(args.service))
        .max_decoding_message_size(keelson_proto::LONGEST_MESSAGE);
    client.ready().await.map_err(|error| to_error(Status::unavailable(error.to_string())))?;
    let is_stream = method.is_client_streaming() || method.is_server_streaming();
    let all = stream::iter(messages);
    let request = if is_stream { Request::new(all) } else { session.agent.request(all) };
    let answer = client.streaming(request, path, DynamicCodec(method.output())).await.map_err(to_error)?;
    let mut answers = answer.into_inner();
    while let Some(message) = answers.message().await.map_err(to_error)? {
        output::print(&output::json_line(&to_json(&message)?)?)?;
    }
    Ok(())
}

/// Finds a method by its name, which may be prefixed with its API.
fn find(pool: &DescriptorPool, args: &GrpcCallArgs) -> Result<MethodDescriptor, CliError> {
    let apis = apis(pool, args.service);
    let (api, name) = match args.method.rsplit_once('/') {
        Some((api, name)) => (Some(api.trim_start_matches('/')), name),
        None => (None, args.method.as_str()),
    };
    let mut methods = apis
        .iter()
        .filter(|known| api.is_none_or(|api| known.full_name() == api))
        .flat_map(|known| known.methods().collect::<Vec<_>>());
    methods.find(|method| method.name() == name).ok_or_else(|| {
        let all: Vec<String> = apis
            .iter()
            .flat_map(|api| api.methods().map(|m| m.name().to_owned()).collect::<Vec<_>>())
            .collect();
        let similar = similar_names(name, all.iter().map(String::as_str));
        CliError::Usage {
            message: format!("{} has no method {:?}", args.service, args.method),
            hint: if similar.is_empty() {
                format!("`keelson grpc list {}` shows its methods", args.service)
            } else {
                format!("did you mean {}?", similar.join(" or "))
            },
        }
    })
}

/// The JSON argument, or standard input for `-`.
fn text(message: &str) -> Result<String, CliError> {
    if message != "-" {
        return Ok(message.to_owned());
    }
    let mut text = String::new();
    let read = std::io::stdin().read_to_string(&mut text);
    read.map_err(|source| CliError::Read { path: "standard input".into(), source })?;
    Ok(text)
}

/// Parses the messages in a JSON text: one, or any number for a method that takes a stream.
fn requests(method: &MethodDescriptor, text: &str) -> Result<Vec<DynamicMessage>, CliError> {
    let input = method.input();
    let invalid = |why: String| CliError::Usage {
        message: format!("not a valid {}: {why}", input.name()),
        hint: format!("its fields: {}", fields(&input)),
    };
    let mut messages = Vec::new();
    for value in serde_json::Deserializer::from_str(text).into_iter::<Value>() {
        let mut value = value.map_err(|error| invalid(error.to_string()))?;
        transform_json_fields(&input, &mut value, &encode_json);
        messages.push(DynamicMessage::deserialize(input.clone(), value).map_err(|e| invalid(e.to_string()))?);
    }
    if !method.is_client_streaming() && messages.len() != 1 {
        return Err(invalid(format!("the method takes one message, found {}", messages.len())));
    }
    Ok(messages)
}

fn fields(message: &MessageDescriptor) -> String {
    let names: Vec<String> = message.fields().map(|field| field.json_name().to_owned()).collect();
    if names.is_empty() { "none, write {}".to_owned() } else { names.join(", ") }
}

fn to_json(message: &DynamicMessage) -> Result<Value, CliError> {
    let failed = |error: serde_json::Error| CliError::Encode { reason: error.to_string() };
    let options = SerializeOptions::new().stringify_64_bit_integers(false);
    let mut value =
        message.serialize_with_options(serde_json::value::Serializer, &options).map_err(failed)?;
    transform_json_fields(&message.descriptor(), &mut value, &decode_json);
    Ok(value)
}

/// Applies `transform` to every bytes field below `value` that holds JSON.
fn transform_json_fields(message: &MessageDescriptor, value: &mut Value, transform: &dyn Fn(&mut Value)) {
    let Some(object) = value.as_object_mut() else { return };
    for field in message.fields() {
        let keys = [field.json_name(), field.name()];
        let Some(found) = keys.into_iter().find(|key| object.contains_key(*key)) else { continue };
        let Some(value) = object.get_mut(found) else { continue };
        transform_field(&field, value, transform);
    }
}

fn transform_field(field: &FieldDescriptor, value: &mut Value, transform: &dyn Fn(&mut Value)) {
    let one = |value: &mut Value| match field.kind() {
        Kind::Bytes if field.name().ends_with("_json") => transform(value),
        Kind::Message(inner) => transform_json_fields(&inner, value, transform),
        _ => {}
    };
    match value {
        Value::Array(all) if field.is_list() => all.iter_mut().for_each(one),
        Value::Object(_) if field.is_map() => {}
        _ => one(value),
    }
}

fn encode_json(value: &mut Value) {
    if value.is_object() || value.is_array() {
        *value = base64::encode(value.to_string().as_bytes()).into();
    }
}

fn decode_json(value: &mut Value) {
    let decoded = value.as_str().and_then(base64::decode);
    if let Some(json) = decoded.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
        *value = json;
    }
}

/// A codec for messages whose descriptor is known at run time.
#[derive(Debug, Clone)]
struct DynamicCodec(MessageDescriptor);

impl Codec for DynamicCodec {
    type Encode = DynamicMessage;
    type Decode = DynamicMessage;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        self.clone()
    }

    fn decoder(&mut self) -> Self {
        self.clone()
    }
}

impl Encoder for DynamicCodec {
    type Item = DynamicMessage;
    type Error = Status;

    fn encode(&mut self, item: DynamicMessage, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(to).map_err(|error| Status::internal(error.to_string()))
    }
}

impl Decoder for DynamicCodec {
    type Item = DynamicMessage;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<DynamicMessage>, Status> {
        let mut message = DynamicMessage::new(self.0.clone());
        message.merge(from).map_err(|error| Status::internal(error.to_string()))?;
        Ok(Some(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn method(service: ServiceName, method: &str) -> Result<MethodDescriptor, CliError> {
        let args = GrpcCallArgs { service, method: method.into(), message: "{}".into() };
        find(&pool().unwrap(), &args)
    }

    #[test]
    fn every_grpc_method_has_callers_and_is_found() {
        let pool = pool().unwrap();
        let mut found = 0;
        for service in ServiceName::ALL {
            for api in apis(&pool, service) {
                for known in api.methods() {
                    assert!(!callers(&known).is_empty(), "{}", known.full_name());
                    assert_eq!(method(service, known.name()).unwrap().full_name(), known.full_name());
                    found += usize::from(!COMMON_APIS.contains(&api.full_name()));
                }
            }
        }
        let common_apis =
            COMMON_APIS.iter().map(|name| pool.get_service_by_name(name).unwrap().methods().count());
        assert_eq!(found + common_apis.sum::<usize>(), CALLERS.len(), "no API is missing");
    }

    #[test]
    fn grpc_list_names_services_without_an_own_api() {
        let pool = pool().unwrap();
        let named = |service| {
            let text = methods(&pool, service).render(0);
            let first = |line: &str| line.split_whitespace().next().unwrap_or_default().to_owned();
            text.lines().skip(1).map(first).collect::<Vec<String>>()
        };
        let all = named(None);
        for service in ServiceName::ALL {
            assert!(all.iter().any(|name| name == service.as_str()), "{service}: {all:?}");
            let own = named(Some(service));
            assert!(!own.is_empty() && own.iter().all(|name| name == service.as_str()), "{own:?}");
        }
        let text = methods(&pool, None).render(0);
        assert!(text.contains("\nnode-api           those of each\n"), "{text}");
    }

    #[test]
    fn unknown_grpc_method_suggests_similar_names() {
        let named = method(ServiceName::NodeApi, "keelson.admin.v1.Admin/GetProgress").unwrap();
        assert_eq!(path_of(&named), "/keelson.admin.v1.Admin/GetProgress");
        let error = method(ServiceName::PodSync, "ListPod").unwrap_err();
        assert_eq!(error.exit_code(), 64);
        assert!(error.hint().unwrap().contains("ListPods"), "{error:?}");
    }

    #[test]
    fn bytes_fields_with_json_are_shown_and_accepted_as_json() {
        let watch = method(ServiceName::PodSync, "ListPods").unwrap().output();
        let pod = serde_json::json!({"metadata": {"name": "a"}});
        let mut value = serde_json::json!({"uid": "u", "podJson": pod});
        transform_json_fields(&watch, &mut value, &encode_json);
        assert!(value["podJson"].is_string());
        let message = DynamicMessage::deserialize(watch, value).unwrap();
        assert_eq!(to_json(&message).unwrap(), serde_json::json!({"uid": "u", "podJson": pod}));
    }

    #[test]
    fn invalid_grpc_message_error_names_the_fields() {
        let explain = method(ServiceName::PodSync, "ExplainPod").unwrap();
        for (text, what) in [("{\"uuid\": 1}", "uuid"), ("{", "EOF"), ("{} {}", "found 2"), ("", "found 0")] {
            let error = requests(&explain, text).unwrap_err();
            assert!(error.to_string().contains(what), "{text}: {error}");
            assert!(error.hint().unwrap().starts_with("its fields: "), "{text}");
        }
    }
}
