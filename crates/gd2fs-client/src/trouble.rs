//! Why an exchange with a node brought nothing, as far as it decides what may be tried next.

use gd2fs_wire::code::{Code, Failure};

#[derive(Clone, Debug)]
pub(crate) enum Trouble {
    /// The node said no, or wrong bytes arrived: nothing was changed.
    Refused(Failure),
    /// The connection ended. What was sent may have had its effect.
    Lost(Failure),
    /// No connection could be made.
    Unreachable(Failure),
    /// The deadline, or somebody who no longer wants it.
    Stopped(Failure),
}

impl Trouble {
    /// Bytes that did not match their sums.
    pub fn is_checksum(&self) -> bool {
        matches!(self, Trouble::Refused(Failure { code: Code::Checksum, .. }))
    }

    pub fn into_failure(self) -> Failure {
        match self {
            Trouble::Refused(failure)
            | Trouble::Lost(failure)
            | Trouble::Unreachable(failure)
            | Trouble::Stopped(failure) => failure,
        }
    }
}
