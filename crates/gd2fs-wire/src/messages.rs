//! JSON bodies of the operations that are not on the hot path.

use serde::{Deserialize, Serialize};

/// Items of one SEAL, DELETE or STAT.
pub const ITEMS_MAX: usize = 4096;

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
    /// The column existed under an earlier incarnation of the node, whose memory is gone.
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnStat {
    pub length: u64,
    pub sealed: u64,
    pub grant: u64,
    pub epoch: u32,
    /// Bytes of memory that the column holds.
    pub bytes: u64,
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

/// The body of a reply whose status is not OK.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    pub message: String,
}
