//! JSON bodies of the operations that are not on the hot path.

use serde::{Deserialize, Serialize};

/// Items of one SEAL, DELETE, STAT, PIN or UNPIN, and columns of one LIST: with under 1 KiB each they fit into a payload.
pub const ITEMS_MAX: usize = 4096;
/// Extents of one answer to WHERE: 51 bytes each at most, so that all of them fit into an ext of 65,535 bytes.
pub const EXTENTS_MAX: usize = 1024;
/// The longest life of a pin, which is the longest that a plan may have: a control that is gone keeps no memory for ever.
pub const PIN_TTL_MS_MAX: u64 = 3_600_000;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Lowest and highest protocol version that the client speaks.
    pub versions: (u8, u8),
    /// Feature bits (TLS, trace context, compression are reserved): none is built yet.
    pub features: u64,
    pub cluster: String,
    pub token: String,
    /// 128 random bits of one client object in hex; with `slot` it names a line of connections that replace each other.
    pub client: String,
    pub slot: u32,
    /// Rising with every reconnection of a slot: an older connection of it can publish nothing any more.
    pub generation: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloReply {
    pub version: u8,
    pub features: u64,
    pub node: String,
    pub cluster: String,
    pub incarnation: u32,
    pub payload_bytes_max: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    pub column: u32,
    pub capability: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenReply {
    pub handle: u32,
    /// Highest acknowledged end in this column, as a file offset.
    pub length: u64,
    pub sealed: u64,
    pub grant: u64,
    /// The column existed under an earlier incarnation of the node, and nobody knows where it ended.
    pub lost: bool,
}

/// Registers memory of the client for one-sided transfers on this connection; its descriptor comes with the frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Map {
    /// Chosen by the client; what segments name it by.
    pub region: u32,
    pub length: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unmap {
    pub region: u32,
}

/// What WARM and WHERE ask about: `[start, end)` as file offsets, of which only the chunks of the handle's column count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    pub start: u64,
    pub end: u64,
}

/// Where a byte is, or why it is nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    Dram,
    Nvme,
    /// It was there, or may have been, and is not any more.
    Lost,
    /// It was never written.
    Hole,
}

impl Tier {
    /// As in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Dram => "dram",
            Tier::Nvme => "nvme",
            Tier::Lost => "lost",
            Tier::Hole => "hole",
        }
    }
}

/// Bytes of a range by where they are, before anything was lifted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warmth {
    pub dram: u64,
    pub nvme: u64,
    pub missing: u64,
    /// Of `nvme`, what the node has tried to read last and could not; an older node does not say.
    #[serde(default)]
    pub unreadable: u64,
}

/// The parts of a range that lie in one column: in order, of two neighbours of one kind only one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whereabouts {
    /// Start and end as file offsets.
    pub extents: Vec<(u64, u64, Tier)>,
    /// Where to go on; None: nothing is left.
    pub next: Option<u64>,
    /// From here to the end of what was asked all of the column is of one kind, in however many chunks.
    pub rest: Option<(u64, Tier)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Items<T> {
    pub items: Vec<T>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnName {
    pub file: String,
    pub column: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnStat {
    pub length: u64,
    pub sealed: u64,
    pub grant: u64,
    pub epoch: u32,
    /// Bytes of memory that the column holds.
    pub bytes: u64,
    /// Control has had it deleted, and the node still remembers that; then all else is 0.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deleted: bool,
    /// In an earlier life of the node the column may have reached beyond `length`.
    pub end_lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SealItem {
    pub file: String,
    pub column: u32,
    pub epoch: u32,
    pub born: u32,
    pub grant: u64,
    pub stripe_unit: u32,
    pub width: u32,
    /// File offset below which nothing may change again.
    pub length: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealReply {
    pub status: u32,
    pub sealed: u64,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeleteReply {
    /// Bytes of memory given back.
    pub freed: u64,
}

/// Keeps `[start, end)` of a column from being evicted, until UNPIN or for `ttl_ms`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinItem {
    /// The plan's id: 128 bits in hex.
    pub pin: String,
    pub file: String,
    pub column: u32,
    pub epoch: u32,
    pub start: u64,
    pub end: u64,
    pub ttl_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinReply {
    /// OK also where only the bytes below `valid` are there, and pinned.
    pub status: u32,
    /// The first byte of the range in this column that is not there; None: all are.
    pub valid: Option<u64>,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnpinItem {
    pub pin: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnpinReply {
    /// Ranges that were pinned under it.
    pub ranges: u64,
}

/// Asks for the columns that a node keeps, in the order of (file, column).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct List {
    /// Only those behind this one.
    pub after: Option<ColumnName>,
    pub limit: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    pub items: Vec<ListItem>,
    /// `after` of the next page; None: this is the last one.
    pub next: Option<ColumnName>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListItem {
    pub file: String,
    pub column: u32,
    pub epoch: u32,
    pub sealed: u64,
    pub grant: u64,
    pub length: u64,
    /// The first byte below length or seal, as a file offset in this column, that is not there; None: all are.
    pub valid: Option<u64>,
    pub dram_bytes: u64,
    pub nvme_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scrub {
    /// Begins a round, if none runs.
    pub start: bool,
}

/// How far the round is that runs, or how the last one ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScrubState {
    pub running: bool,
    /// Gone through, of `bytes_total`: what was kept when the round began.
    pub bytes: u64,
    pub bytes_total: u64,
    /// Dropped by this round, since their bytes did not match their sums.
    pub corrupt_chunks: u64,
    /// Left as they were by this round, since their log could not be read.
    pub unreadable_chunks: u64,
    pub seconds: f64,
    /// Rounds that have ended.
    pub rounds: u64,
}

/// Columns whose valid prefix has changed, for control.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Stands for all changes up to those of `items`, and none behind.
    pub sequence: u64,
    pub items: Vec<ReportItem>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportItem {
    pub file: String,
    pub column: u32,
    /// As in `ListItem`.
    pub valid: Option<u64>,
    pub sealed: u64,
    pub epoch: u32,
    pub length: u64,
}

/// The body of a reply whose status is not OK.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_answers_fit_into_their_frames() {
        let extents = vec![(u64::MAX, u64::MAX, Tier::Nvme); EXTENTS_MAX];
        let (next, rest) = (Some(u64::MAX), Some((u64::MAX, Tier::Nvme)));
        let ext = serde_json::to_vec(&Whereabouts { extents, next, rest }).unwrap();
        assert!(ext.len() <= usize::from(u16::MAX), "{}", ext.len());
        let item = ListItem {
            file: "f".repeat(32),
            column: u32::MAX,
            epoch: u32::MAX,
            sealed: u64::MAX,
            grant: u64::MAX,
            length: u64::MAX,
            valid: Some(u64::MAX),
            dram_bytes: u64::MAX,
            nvme_bytes: u64::MAX,
        };
        let next = Some(ColumnName { file: item.file.clone(), column: u32::MAX });
        let payload = serde_json::to_vec(&Listing { items: vec![item; ITEMS_MAX], next }).unwrap();
        assert!(payload.len() <= crate::header::CONTROL_BYTES_MAX as usize, "{}", payload.len());
    }

    #[test]
    fn tiers_are_lowercase_and_spans_are_strict() {
        let tiers = [Tier::Dram, Tier::Nvme, Tier::Lost, Tier::Hole];
        assert_eq!(serde_json::to_string(&tiers).unwrap(), r#"["dram","nvme","lost","hole"]"#);
        for tier in tiers {
            assert_eq!(serde_json::to_value(tier).unwrap(), tier.name());
        }
        assert!(serde_json::from_str::<Span>(r#"{"start": 0, "end": 1}"#).is_ok());
        for wrong in
            [r#"{"start": 0}"#, r#"{"start": -1, "end": 1}"#, r#"{"start": 0, "end": 1, "tier": "dram"}"#]
        {
            assert!(serde_json::from_str::<Span>(wrong).is_err(), "{wrong}");
        }
    }
}
