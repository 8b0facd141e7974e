//! What the signed texts say. Unknown fields are refused: a restriction must never be ignored.

use serde::{Deserialize, Serialize};

use crate::code::{Code, Failure};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Client,
    Node,
    Control,
    Admin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Right {
    Read,
    Write,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    Cache,
    Durable,
}

/// Who somebody is. `expiry` is in unix seconds, here and below.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "typ", rename = "token", deny_unknown_fields)]
pub struct Token {
    pub tenant: String,
    pub role: Role,
    pub expiry: u64,
}

/// What may be done with one file; the layout carries it from control to the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "typ", rename = "cap", deny_unknown_fields)]
pub struct Capability {
    pub tenant: String,
    /// 128 random bits in hex.
    pub file: String,
    pub class: Class,
    pub stripe_unit: u32,
    pub width: u32,
    pub rights: Vec<Right>,
    /// Byte ranges `[start, end)` of the file; end -1 is open, no range at all means everything.
    pub ranges: Vec<(u64, i64)>,
    /// Number of the write grant; 0 is plain file semantics.
    pub grant: u64,
    /// (epoch, born) of each column; born is the node's incarnation when the column was placed on it.
    pub columns: Vec<(u32, u32)>,
    /// The nodes that hold each column, in the order of its replicas: nobody else serves it.
    pub nodes: Vec<Vec<String>>,
    pub expiry: u64,
    /// The holder counts, not its tenant: the capability travelled with a request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bearer: bool,
    /// What is higher is given up later by a node that is full.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub priority: u8,
}

fn is_zero(number: &u8) -> bool {
    *number == 0
}

/// The right to commit or abort one plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "typ", rename = "plan", deny_unknown_fields)]
pub struct PlanToken {
    pub plan: String,
    pub session: String,
    pub tenant: String,
    pub expiry: u64,
}

impl Capability {
    pub fn allows(&self, right: Right, offset: u64, length: u64) -> Result<(), Failure> {
        let end = offset.saturating_add(length);
        let refuse = |why: &str| {
            Err(Failure::new(Code::Forbidden, format!("file {} [{offset}, {end}): {why}", self.file)))
        };
        if !self.rights.contains(&right) {
            return refuse(match right {
                Right::Read => "the capability does not allow reading",
                Right::Write => "the capability does not allow writing",
            });
        }
        let inside = |(start, stop): &(u64, i64)| *start <= offset && (*stop < 0 || end <= *stop as u64);
        if !self.ranges.is_empty() && !self.ranges.iter().any(inside) {
            return refuse("outside the ranges of the capability");
        }
        Ok(())
    }

    /// Whether `node` is one of those that hold `column`.
    pub fn places(&self, column: u32, node: &str) -> bool {
        self.nodes.get(column as usize).is_some_and(|replicas| replicas.iter().any(|replica| replica == node))
    }

    pub fn file_id(&self) -> Result<u128, Failure> {
        parse_file_id(&self.file)
    }
}

pub fn parse_file_id(text: &str) -> Result<u128, Failure> {
    (text.len() == 32)
        .then(|| u128::from_str_radix(text, 16).ok())
        .flatten()
        .ok_or_else(|| Failure::new(Code::BadRequest, format!("file {text:?} is not 32 hex digits")))
}

pub fn format_file_id(file: u128) -> String {
    format!("{file:032x}")
}
