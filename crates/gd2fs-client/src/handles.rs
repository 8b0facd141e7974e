//! What a connection has opened: one OPEN per capability and column, however many requests need it at once.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use gd2fs_wire::code::{Code, Failure};
use gd2fs_wire::header::{Header, Opcode};
use gd2fs_wire::messages::{Open, OpenReply};
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::call::{Call, Outgoing};
use crate::connection::Connection;
use crate::stop::{Stop, Stopper};
use crate::trouble::Trouble;

/// A node allows 65,536 per connection; far fewer are warm at once, and each costs the node memory.
const HANDLES_MAX: usize = 4096;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Held while requests use the handle, so that it is not closed under them.
pub(crate) type Handle = Arc<OnceCell<u32>>;

#[derive(Default)]
pub(crate) struct Handles {
    cells: Mutex<HashMap<Key, Handle>>,
}

/// A layout's own capability, told from others by its place: comparing hundreds of characters for each request is dear.
struct Key(Arc<str>, u32);

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        Arc::ptr_eq(&self.0, &other.0) && self.1 == other.1
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (Arc::as_ptr(&self.0).addr(), self.1).hash(state);
    }
}

impl Connection {
    /// The handle for `column` of the file that `capability` names.
    pub async fn handle(
        self: &Arc<Self>,
        capability: &Arc<str>,
        column: u32,
        stop: &mut Stop,
    ) -> Result<(u32, Handle), Trouble> {
        let cell = self.handle_cell(capability, column)?;
        // Whoever waits for another's OPEN waits no longer than its own time.
        let mut waiting = stop.clone();
        let open = cell.get_or_try_init(|| async { Ok(self.open(capability, column, stop).await?.handle) });
        let handle = waiting.race(open).await.map_err(Trouble::Stopped)??;
        Ok((*handle, cell))
    }

    /// The same if it is open already.
    pub fn open_handle(&self, capability: &Arc<str>, column: u32) -> Option<(u32, Handle)> {
        let cell = self.handles.cells.lock().get(&Key(capability.clone(), column)).cloned()?;
        cell.get().copied().map(|handle| (handle, cell))
    }

    fn handle_cell(self: &Arc<Self>, capability: &Arc<str>, column: u32) -> Result<Handle, Trouble> {
        let key = Key(capability.clone(), column);
        let mut cells = self.handles.cells.lock();
        if let Some(cell) = cells.get(&key) {
            return Ok(cell.clone());
        }
        if cells.len() >= HANDLES_MAX {
            // Any one that nobody holds will do: with so many, none is clearly the coldest.
            let idle = cells
                .iter()
                .find(|(_, cell)| Arc::strong_count(cell) == 1)
                .map(|(Key(capability, column), _)| Key(capability.clone(), *column));
            let Some(idle) = idle else {
                let why = format!("{HANDLES_MAX} files are in use at once on one connection");
                return Err(Trouble::Refused(Failure::new(Code::Overloaded, why)));
            };
            let closed = cells.remove(&idle).and_then(|cell| cell.get().copied());
            if let Some(handle) = closed {
                tokio::spawn(self.clone().close(handle));
            }
        }
        Ok(cells.entry(key).or_default().clone())
    }

    /// Always asks the node: its reply says how long the column is now.
    pub async fn open(
        self: &Arc<Self>,
        capability: &str,
        column: u32,
        stop: &mut Stop,
    ) -> Result<OpenReply, Trouble> {
        let open = Open { column, capability: capability.into() };
        let ext = serde_json::to_vec(&open).expect("plain data serialises");
        if ext.len() > usize::from(u16::MAX) {
            return Err(Trouble::Refused(Failure::new(
                Code::TooLarge,
                "the capability does not fit into an OPEN",
            )));
        }
        let mut header = Header::request(Opcode::Open, 0);
        header.deadline_ms = deadline_ms(stop);
        let reply = self.call(Call { ext, ..Call::new(header, Outgoing::Nothing) }, stop).await?;
        reply.frame.message().map_err(Trouble::Refused)
    }

    pub async fn close(self: Arc<Self>, handle: u32) {
        let mut header = Header::request(Opcode::Close, 0);
        header.handle = handle;
        let mut stop = Stopper::new(CLOSE_TIMEOUT).stop();
        // Nobody waits for it, and a handle that stays open costs the node little until the connection ends.
        if let Err(trouble) = self.call(Call::new(header, Outgoing::Nothing), &mut stop).await {
            tracing::debug!(handle, error = %trouble.into_failure(), "CLOSE failed");
        }
    }
}

/// What the node may take: what is left of the request's time.
pub(crate) fn deadline_ms(stop: &Stop) -> u32 {
    // 0 would mean the node's own default.
    u32::try_from(stop.remaining().as_millis()).unwrap_or(u32::MAX).max(1)
}
