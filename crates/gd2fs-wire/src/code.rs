//! The one table of errors: the same numbers on the wire, in Rust, in Python and (as errno) in C.

use thiserror::Error;

macro_rules! codes {
    ($($name:ident = $value:literal, $label:literal, $errno:ident, $retry:literal, $changed:literal;)+) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Code { $($name = $value),+ }

        impl Code {
            pub const ALL: &[Code] = &[$(Code::$name),+];
            /// An unknown number (a newer peer) reads as `Internal`.
            pub fn from_u32(value: u32) -> Code {
                match value { $($value => Code::$name,)+ _ => Code::Internal }
            }
            pub fn name(self) -> &'static str {
                match self { $(Code::$name => $label),+ }
            }
            pub fn errno(self) -> i32 {
                match self { $(Code::$name => errno::$errno),+ }
            }
            /// Whether the same request may succeed later, or after a fresh layout.
            pub fn retryable(self) -> bool {
                match self { $(Code::$name => $retry),+ }
            }
            /// Whether the request may have had an effect all the same.
            pub fn may_have_changed(self) -> bool {
                match self { $(Code::$name => $changed),+ }
            }
        }
    };
}

/// Linux errno values; spelled out so that the table does not depend on the host it is built on.
mod errno {
    pub const NONE: i32 = 0;
    pub const EPERM: i32 = 1;
    pub const ENOENT: i32 = 2;
    pub const EIO: i32 = 5;
    pub const EAGAIN: i32 = 11;
    pub const EACCES: i32 = 13;
    pub const EEXIST: i32 = 17;
    pub const ENOTDIR: i32 = 20;
    pub const EISDIR: i32 = 21;
    pub const EINVAL: i32 = 22;
    pub const ENOSPC: i32 = 28;
    pub const ENOTEMPTY: i32 = 39;
    pub const ENODATA: i32 = 61;
    pub const EPROTO: i32 = 71;
    pub const EBADMSG: i32 = 74;
    pub const EMSGSIZE: i32 = 90;
    pub const EOPNOTSUPP: i32 = 95;
    pub const ECONNRESET: i32 = 104;
    pub const ESHUTDOWN: i32 = 108;
    pub const ETIMEDOUT: i32 = 110;
    pub const ESTALE: i32 = 116;
    pub const ECANCELED: i32 = 125;
    pub const EKEYEXPIRED: i32 = 127;
    pub const EKEYREJECTED: i32 = 129;
}

codes! {
    // name = number, label, errno, a retry can help, may have changed something
    Ok = 0, "OK", NONE, false, true;
    // 100: wire
    BadFrame = 101, "BAD_FRAME", EPROTO, false, false;
    Version = 102, "VERSION", EPROTO, false, false;
    UnknownOpcode = 103, "UNKNOWN_OPCODE", EPROTO, false, false;
    BadRequest = 104, "BAD_REQUEST", EINVAL, false, false;
    TooLarge = 105, "TOO_LARGE", EMSGSIZE, false, false;
    Timeout = 106, "TIMEOUT", ETIMEDOUT, true, true;
    Disconnected = 107, "DISCONNECTED", ECONNRESET, true, true;
    Overloaded = 108, "OVERLOADED", EAGAIN, true, false;
    ShuttingDown = 109, "SHUTTING_DOWN", ESHUTDOWN, true, false;
    Cancelled = 110, "CANCELLED", ECANCELED, false, true;
    Checksum = 111, "CHECKSUM", EBADMSG, true, false;
    Internal = 112, "INTERNAL", EIO, false, true;
    // 200: store
    Hole = 201, "HOLE", ENODATA, false, false;
    Lost = 202, "LOST", ENODATA, false, false;
    Sealed = 203, "SEALED", EPERM, false, false;
    NoSpace = 204, "NO_SPACE", ENOSPC, true, false;
    Corrupt = 205, "CORRUPT", EIO, false, false;
    Deleted = 206, "DELETED", ESTALE, false, false;
    // 300: layout
    StaleLayout = 301, "STALE_LAYOUT", ESTALE, true, false;
    StaleWriter = 302, "STALE_WRITER", ESTALE, false, false;
    StaleIncarnation = 303, "STALE_INCARNATION", ESTALE, true, false;
    WrongNode = 304, "WRONG_NODE", ESTALE, true, false;
    NotHere = 305, "NOT_HERE", ESTALE, true, false;
    // 400: auth
    Unauthenticated = 401, "UNAUTHENTICATED", EACCES, false, false;
    Forbidden = 402, "FORBIDDEN", EACCES, false, false;
    Expired = 403, "EXPIRED", EKEYEXPIRED, true, false;
    BadSignature = 404, "BAD_SIGNATURE", EKEYREJECTED, false, false;
    WrongCluster = 405, "WRONG_CLUSTER", EACCES, false, false;
    // 500: control
    NotFound = 501, "NOT_FOUND", ENOENT, false, false;
    Exists = 502, "EXISTS", EEXIST, false, false;
    NotEmpty = 503, "NOT_EMPTY", ENOTEMPTY, false, false;
    IsADirectory = 504, "IS_A_DIRECTORY", EISDIR, false, false;
    NotADirectory = 505, "NOT_A_DIRECTORY", ENOTDIR, false, false;
    Conflict = 506, "CONFLICT", EAGAIN, true, false;
    Unavailable = 507, "UNAVAILABLE", EAGAIN, true, true;
    Invalid = 508, "INVALID", EINVAL, false, false;
    NoNodes = 509, "NO_NODES", ENOSPC, true, false;
    Unsupported = 510, "UNSUPPORTED", EOPNOTSUPP, false, false;
    // 600: kv
    PlanExpired = 601, "PLAN_EXPIRED", ESTALE, false, false;
    PlanSuperseded = 602, "PLAN_SUPERSEDED", ESTALE, false, false;
    Identity = 603, "IDENTITY", EINVAL, false, false;
}

/// An error with its code and what a person needs to act on it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{}: {message}", code.name())]
pub struct Failure {
    pub code: Code,
    pub message: String,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_unique_and_fit_their_range() {
        let mut names = std::collections::HashSet::new();
        for code in Code::ALL {
            assert!(names.insert(code.name()), "{}", code.name());
            assert_eq!(Code::from_u32(*code as u32), *code);
            assert!(code.errno() < 256, "libgd2fs returns errno in a u8");
        }
        assert_eq!(Code::from_u32(9999), Code::Internal);
    }
}
