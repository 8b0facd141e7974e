//! HTTP to control, over to the next address when one does not answer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gd2fs_wire::code::{Code, Failure};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::dial::CONNECT_TIMEOUT;

/// The largest answer: a session's token ids as JSON.
const ANSWER_BYTES_MAX: usize = 64 << 20;
const IDLE_CONNECTIONS_MAX: usize = 8;

pub(crate) struct Control {
    addresses: Vec<String>,
    /// The one that answered last.
    preferred: AtomicUsize,
    token: String,
    http: Client<HttpConnector, Full<Bytes>>,
}

impl Control {
    /// `addresses`: `http://HOST:PORT`. Without any, layouts that travel with requests still work; calls are UNAVAILABLE.
    pub fn new(addresses: &[String], token: &str) -> Result<Control, Failure> {
        let invalid = |why: String| Failure::new(Code::Invalid, why);
        for address in addresses {
            let uri: Uri =
                address.parse().map_err(|error| invalid(format!("address {address:?}: {error}")))?;
            if uri.scheme_str() != Some("http") || uri.host().is_none() {
                return Err(invalid(format!("address {address:?} is not http://HOST:PORT")));
            }
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        let http = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(4))
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .build(connector);
        Ok(Control {
            addresses: addresses.iter().map(|address| address.trim_end_matches('/').into()).collect(),
            preferred: AtomicUsize::new(0),
            token: token.into(),
            http,
        })
    }

    /// HTTP status and body. Each address is tried once, all within `timeout`.
    pub async fn call(
        &self,
        method: &str,
        path: &str,
        body: Option<Vec<u8>>,
        timeout: Duration,
    ) -> Result<(u16, Vec<u8>), Failure> {
        let method: Method = method
            .parse()
            .map_err(|_| Failure::new(Code::Invalid, format!("method {method:?} is not an HTTP method")))?;
        if self.addresses.is_empty() {
            return Err(Failure::new(Code::Unavailable, "this client was given no address of control"));
        }
        let body = body.map(Bytes::from);
        let tries = async {
            let first = self.preferred.load(Ordering::Relaxed);
            let mut why = Vec::new();
            for turn in 0..self.addresses.len() {
                let index = (first + turn) % self.addresses.len();
                match self.ask(&method, index, path, body.clone()).await {
                    Ok(answer) => {
                        self.preferred.store(index, Ordering::Relaxed);
                        return Ok(answer);
                    }
                    Err((failure, false)) => return Err(failure),
                    Err((failure, true)) => why.push(failure.message),
                }
            }
            let remedy = "is `gd2fs control` (or `gd2fs up`) running there?";
            Err(Failure::new(
                Code::Unavailable,
                format!("control can't be reached: {}; {remedy}", why.join("; ")),
            ))
        };
        tokio::time::timeout(timeout, tries).await.unwrap_or_else(|_| {
            Err(Failure::new(
                Code::Timeout,
                format!("control at {} gave no answer within {timeout:?}", self.addresses.join(", ")),
            ))
        })
    }

    /// One address. The flag says whether another one may be asked instead.
    async fn ask(
        &self,
        method: &Method,
        index: usize,
        path: &str,
        body: Option<Bytes>,
    ) -> Result<(u16, Vec<u8>), (Failure, bool)> {
        let address = &self.addresses[index];
        let mut request = Request::builder().method(method).uri(format!("{address}{path}"));
        if !self.token.is_empty() {
            request = request.header("authorization", format!("Bearer {}", self.token));
        }
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        let request = request.body(Full::new(body.unwrap_or_default())).map_err(|error| {
            (Failure::new(Code::Invalid, format!("path {path:?} or token: {error}")), false)
        })?;
        let failed =
            |why: String, again: bool| (Failure::new(Code::Unavailable, format!("{address}: {why}")), again);
        // What was asked may have been done, so only a call that changes nothing when repeated goes on to the next address.
        let repeatable = method.is_idempotent();
        let answer = self
            .http
            .request(request)
            .await
            .map_err(|error| failed(root_cause(&error), repeatable || error.is_connect()))?;
        let status = answer.status().as_u16();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX)
            .collect()
            .await
            .map_err(|error| failed(root_cause(&*error), repeatable))?;
        Ok((status, body.to_bytes().into()))
    }
}

/// hyper's own messages name its layers; the cause at the bottom is what helps.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
