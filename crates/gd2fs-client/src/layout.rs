//! Where the bytes of a file live: computed from its layout, never looked up per chunk.

use std::sync::Arc;

use gd2fs_transport::Address;
use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::PAYLOAD_BYTES_MAX;
use gd2fs_wire::sums::PIECE_BYTES;
use serde::Deserialize;

/// A wider file than this is a mistake: its capability would not fit into an OPEN.
const WIDTH_MAX: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    pub node: String,
    /// 0: any.
    pub incarnation: u32,
    pub addresses: Vec<Address>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    pub epoch: u32,
    pub replicas: Vec<Replica>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub file: String,
    /// For messages; a layout that travelled with a request may have none.
    pub path: String,
    pub stripe_unit: u64,
    pub columns: Vec<Column>,
    pub capability: Arc<str>,
    /// Whether control may be asked for a newer one.
    pub refresh: bool,
}

/// A range that lies in one chunk: the unit of transfer, so that readers and writers meet whole chunks only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub column: usize,
    pub offset: u64,
    pub length: u64,
}

/// The JSON of control. Fields that only people and planners need (class, kv_identity, length…) are left to them.
#[derive(Deserialize)]
struct LayoutJson {
    file: String,
    #[serde(default)]
    path: Option<String>,
    stripe_unit: u64,
    width: usize,
    columns: Vec<ColumnJson>,
    capability: String,
    #[serde(default)]
    refresh: bool,
}

#[derive(Deserialize)]
struct ColumnJson {
    epoch: u32,
    replicas: Vec<ReplicaJson>,
}

#[derive(Deserialize)]
struct ReplicaJson {
    node: String,
    #[serde(default)]
    incarnation: u32,
    addresses: Vec<String>,
}

impl Layout {
    pub fn parse(text: &str) -> Result<Layout, Failure> {
        let invalid = |why: String| Failure::new(Code::BadRequest, format!("layout: {why}"));
        let json: LayoutJson = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        if json.stripe_unit == 0
            || !json.stripe_unit.is_multiple_of(PIECE_BYTES)
            || json.stripe_unit > u64::from(PAYLOAD_BYTES_MAX)
        {
            return Err(invalid(format!(
                "stripe_unit {} is not a multiple of 32 KiB up to 64 MiB",
                json.stripe_unit
            )));
        }
        if json.columns.is_empty() || json.columns.len() > WIDTH_MAX || json.width != json.columns.len() {
            let columns = json.columns.len();
            return Err(invalid(format!(
                "width {} with {columns} columns; 1 to {WIDTH_MAX} and equal are needed",
                json.width
            )));
        }
        let columns = json.columns.into_iter().enumerate().map(|(index, column)| {
            let wrong = |failure: Failure| {
                Failure::new(failure.code, format!("layout: columns[{index}]: {}", failure.message))
            };
            column.checked().map_err(wrong)
        });
        Ok(Layout {
            path: json.path.unwrap_or_else(|| format!("file {}", json.file)),
            file: json.file,
            stripe_unit: json.stripe_unit,
            columns: columns.collect::<Result<_, _>>()?,
            capability: json.capability.into(),
            refresh: json.refresh,
        })
    }

    /// Splits `[offset, offset + length)` into parts, in file order.
    pub fn parts(&self, offset: u64, length: u64) -> impl Iterator<Item = Part> {
        let (mut at, end) = (offset, offset + length);
        std::iter::from_fn(move || {
            let chunk = at / self.stripe_unit;
            let next = (chunk + 1).saturating_mul(self.stripe_unit).min(end);
            (at < end).then(|| {
                let column = (chunk % self.columns.len() as u64) as usize;
                let part = Part { column, offset: at, length: next - at };
                at = next;
                part
            })
        })
    }
}

impl ColumnJson {
    fn checked(self) -> Result<Column, Failure> {
        let replicas: Vec<Replica> =
            self.replicas.into_iter().map(ReplicaJson::checked).collect::<Result<_, _>>()?;
        if replicas.is_empty() {
            return Err(Failure::new(Code::BadRequest, "no replica"));
        }
        Ok(Column { epoch: self.epoch, replicas })
    }
}

impl ReplicaJson {
    fn checked(self) -> Result<Replica, Failure> {
        if self.addresses.is_empty() {
            let message = format!("node {:?} has no address yet: it is starting; try again", self.node);
            return Err(Failure::new(Code::Unavailable, message));
        }
        // Addresses of transports that this client does not speak are left to those that do.
        let spoken = |text: &&String| text.starts_with("tcp://") || text.starts_with("shm://");
        let addresses: Vec<Address> = self
            .addresses
            .iter()
            .filter(spoken)
            .map(|text| Address::parse(text))
            .collect::<Result<_, _>>()
            .map_err(|why| Failure::new(Code::BadRequest, why.to_string()))?;
        if addresses.is_empty() {
            let (node, all) = (&self.node, &self.addresses);
            let message = format!("node {node:?} has no tcp:// or shm:// address among {all:?}");
            return Err(Failure::new(Code::BadRequest, message));
        }
        Ok(Replica { node: self.node, incarnation: self.incarnation, addresses })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn layout(stripe_unit: u64, width: usize) -> Layout {
        let column = |index: usize| {
            serde_json::json!({"epoch": 1, "born": 1, "replicas": [
                {"node": format!("n{index}"), "incarnation": 1, "addresses": ["tcp://127.0.0.1:7528", "rdma://127.0.0.1"]}]})
        };
        let json = serde_json::json!({
            "file": "00112233445566778899aabbccddeeff", "path": "/a", "class": "cache", "stripe_unit": stripe_unit,
            "width": width, "grant": 0, "columns": (0..width).map(column).collect::<Vec<_>>(), "capability": "gd2fs1.0.a.b",
            "expires_at": 0, "kv_identity": null, "length": null, "refresh": true});
        Layout::parse(&json.to_string()).unwrap()
    }

    #[test]
    fn a_bad_layout_is_refused_by_field() {
        let good = serde_json::json!({"file": "f", "stripe_unit": 32768, "width": 1, "capability": "c", "columns": [
            {"epoch": 1, "replicas": [{"node": "n", "addresses": ["tcp://127.0.0.1"]}]}]});
        assert_eq!(
            Layout::parse(&good.to_string()).unwrap().columns[0].replicas[0].addresses[0].to_string(),
            "tcp://127.0.0.1:7528"
        );
        let refused = |change: &dyn Fn(&mut serde_json::Value), word: &str| {
            let mut bad = good.clone();
            change(&mut bad);
            let failure = Layout::parse(&bad.to_string()).unwrap_err();
            assert_eq!(failure.code, Code::BadRequest);
            assert!(failure.message.contains(word), "{}", failure.message);
        };
        refused(&|l| l["stripe_unit"] = 1000.into(), "stripe_unit");
        refused(&|l| l["width"] = 2.into(), "width");
        refused(&|l| l["columns"][0]["replicas"] = serde_json::json!([]), "columns[0]");
        refused(&|l| l["columns"][0]["replicas"][0]["addresses"][0] = "rdma://1.2.3.4".into(), "no tcp://");
        refused(&|l| l["columns"][0]["replicas"][0]["addresses"][0] = "tcp://host:1".into(), "address");
        refused(&|l| l["capability"] = serde_json::Value::Null, "string");
        let mut starting = good.clone();
        starting["columns"][0]["replicas"][0]["addresses"] = serde_json::json!([]);
        assert_eq!(Layout::parse(&starting.to_string()).unwrap_err().code, Code::Unavailable);
    }

    proptest! {
        #[test]
        fn parts_cover_the_range_once_and_stay_inside_their_chunk(
            pieces in 1u64..600, width in 1usize..6, offset in 0u64..300_000_000, length in 0u64..100_000_000
        ) {
            let unit = pieces * PIECE_BYTES;
            let layout = layout(unit, width);
            let mut at = offset;
            for part in layout.parts(offset, length) {
                prop_assert_eq!(part.offset, at);
                prop_assert!(part.length > 0 && part.length <= unit);
                let chunk = part.offset / unit;
                prop_assert_eq!((part.offset + part.length - 1) / unit, chunk);
                prop_assert_eq!(part.column as u64, chunk % width as u64);
                at += part.length;
            }
            prop_assert_eq!(at, offset + length);
        }
    }
}
