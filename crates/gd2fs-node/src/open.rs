//! OPEN and CLOSE: a capability becomes a handle of this connection.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use gd2fs_store::Column;
use gd2fs_transport::Frame;
use gd2fs_wire::capability::{Class, Right};
use gd2fs_wire::messages::{Open, OpenReply};
use gd2fs_wire::{Capability, Code, Failure, Header, Role};

use crate::connection::{Connection, Reply, check_expiry};

const HANDLES_MAX: usize = 65_536;
/// More ranges than any plan has; it bounds a handle to 16 KiB.
const RANGES_MAX: usize = 1024;
/// What the handles of all connections together may take, so that opening alone can never exhaust a node's memory.
const HANDLE_BYTES_MAX: usize = 256 << 20;
/// A handle without its ranges, with its place in the table.
const HANDLE_BYTES: usize = 512;

/// An open column. Known to its connection only.
pub(crate) struct Handle {
    pub column: Arc<Column>,
    pub capability: Capability,
    _memory: HandleMemory,
}

/// A handle's share of `HANDLE_BYTES_MAX`, given back when it goes.
struct HandleMemory {
    taken: Arc<AtomicUsize>,
    bytes: usize,
}

impl HandleMemory {
    fn take(taken: &Arc<AtomicUsize>, ranges: usize) -> Result<HandleMemory, Failure> {
        let bytes = HANDLE_BYTES + ranges * size_of::<(u64, i64)>();
        let memory = HandleMemory { taken: taken.clone(), bytes };
        if taken.fetch_add(bytes, Relaxed) + bytes > HANDLE_BYTES_MAX {
            let message =
                format!("the open handles of this node take {HANDLE_BYTES_MAX} bytes; try again later");
            return Err(Failure::new(Code::Overloaded, message));
        }
        Ok(memory)
    }
}

impl Drop for HandleMemory {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, Relaxed);
    }
}

impl Connection<'_> {
    pub(crate) async fn open(&mut self, frame: &Frame) -> Result<Reply, Failure> {
        check_expiry(self.shared.store.clock(), self.token.expiry, "token")?;
        let ask: Open = frame.message()?;
        let mut capability: Capability = self.shared.keys.verify(&ask.capability)?;
        check_expiry(self.shared.store.clock(), capability.expiry, "capability")?;
        self.check_tenant(&capability)?;
        if capability.class != Class::Cache {
            return Err(Failure::new(
                Code::Unsupported,
                "class \"durable\" is not built yet; use a cache directory",
            ));
        }
        if capability.ranges.len() > RANGES_MAX {
            let message =
                format!("ranges has {} entries, at most {RANGES_MAX} are taken", capability.ranges.len());
            return Err(Failure::new(Code::BadRequest, message));
        }
        if self.handles.len() >= HANDLES_MAX {
            let message = format!("{HANDLES_MAX} handles are open on this connection; CLOSE some");
            return Err(Failure::new(Code::Overloaded, message));
        }
        let node = &self.shared.config.node;
        if !capability.places(ask.column, node) {
            // Bytes on a node that control did not choose would belong to nobody and never be freed.
            let message =
                format!("column {} of file {} is not on node {node:?}", ask.column, capability.file);
            return Err(Failure::new(Code::WrongNode, message));
        }
        let memory = HandleMemory::take(&self.shared.handle_bytes, capability.ranges.len())?;
        let (column, opened) = self.shared.store.open(&capability, ask.column).await?;
        // Only this column's were of interest; a handle stays small.
        (capability.columns, capability.nodes) = (Vec::new(), Vec::new());
        let number = self.fresh_handle();
        self.handles.insert(number, Arc::new(Handle { column, capability, _memory: memory }));
        let reply = OpenReply {
            handle: number,
            length: opened.length,
            sealed: opened.sealed,
            grant: opened.grant,
            lost: opened.lost,
        };
        let header = Header { handle: number, ..self.reply(&frame.header) };
        Ok(Reply::Bare(Frame::with_message(header, &reply)?))
    }

    pub(crate) fn close(&mut self, header: &Header) -> Result<Reply, Failure> {
        match self.handles.remove(&header.handle) {
            Some(_) => Ok(Reply::Bare(Frame::new(self.reply(header)))),
            None => Err(unknown(header.handle)),
        }
    }

    /// The handle of a READ or WRITE, if its capability still allows this range.
    pub(crate) fn authorised(&self, header: &Header, right: Right) -> Result<Arc<Handle>, Failure> {
        let handle = self.handle(header)?;
        handle.capability.allows(right, header.offset, u64::from(header.length))?;
        Ok(handle)
    }

    /// The handle that a request names, if its capability still counts.
    pub(crate) fn handle(&self, header: &Header) -> Result<Arc<Handle>, Failure> {
        let handle = self.handles.get(&header.handle).ok_or_else(|| unknown(header.handle))?;
        check_expiry(self.shared.store.clock(), handle.capability.expiry, "capability")?;
        Ok(handle.clone())
    }

    fn check_tenant(&self, capability: &Capability) -> Result<(), Failure> {
        let trusted = matches!(self.token.role, Role::Admin | Role::Control);
        if trusted || capability.bearer || capability.tenant == self.token.tenant {
            return Ok(());
        }
        let message = format!("file {} belongs to another tenant than the token", capability.file);
        Err(Failure::new(Code::Forbidden, message))
    }

    fn fresh_handle(&mut self) -> u32 {
        loop {
            self.last_handle = self.last_handle.wrapping_add(1);
            if self.last_handle != 0 && !self.handles.contains_key(&self.last_handle) {
                return self.last_handle;
            }
        }
    }
}

fn unknown(handle: u32) -> Failure {
    Failure::new(Code::BadRequest, format!("handle {handle} is not open on this connection"))
}
