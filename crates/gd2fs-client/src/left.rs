//! What is left in doubt when a connection has ended: memory that its node may still be writing to.

use std::time::Duration;

use gd2fs_transport::Receiver;

use crate::one_sided::Held;
use crate::pending::Pending;

/// What the node may still be writing to when a connection has ended.
#[derive(Default)]
pub(crate) struct Left {
    pub doubtful: Vec<Pending>,
    /// Their requests have ended: nobody waits for slots of a ring.
    pub slots: Vec<Held>,
}

impl Left {
    pub fn is_empty(&self) -> bool {
        self.doubtful.is_empty() && self.slots.is_empty()
    }

    /// The node has ended: nothing of it is in use any more.
    pub fn free(mut self) {
        self.slots.clear();
        self.doubtful.drain(..).for_each(Pending::finish);
    }

    /// Takes the memory away from a node that does not say whether it still writes there.
    pub async fn sever(mut self, mut receiver: Option<&mut Receiver>) {
        self.retire_slots();
        while let Some(pending) = self.doubtful.last() {
            if let Err(error) = pending.held.sever() {
                // The system has no mapping left for us. The node may end meanwhile, or somebody give mappings back.
                tracing::error!(%error, "memory under a transfer of a node that does not answer can't be severed");
                let pause = tokio::time::sleep(Duration::from_secs(1));
                match &mut receiver {
                    None => pause.await,
                    Some(receiver) => tokio::select! {
                        () = receiver.drain() => return self.free(),
                        () = pause => {}
                    },
                }
                continue;
            }
            self.doubtful.pop().expect("just seen").finish();
        }
    }

    fn retire_slots(&mut self) {
        for held in self.slots.drain(..) {
            // Gives up all of their ring, which never fails.
            let _ = held.sever();
        }
    }
}

impl Drop for Left {
    /// A runtime that ends in the middle: what is still in doubt is severed here, before anybody is told that it is free.
    fn drop(&mut self) {
        self.retire_slots();
        for pending in self.doubtful.drain(..) {
            if let Err(error) = pending.held.sever() {
                tracing::error!(%error, "memory under a transfer can't be severed");
            }
        }
    }
}
