//! All connections to one node: a slot for every (NIC, stream), opened when it is first needed.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gd2fs_transport::Address;
use gd2fs_wire::code::{Code, Failure};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::connection::Connection;
use crate::dial::{Caller, Transport, Whom};
use crate::region::Regions;
use crate::staging::Ring;
use crate::stats::{Stats, add};
use crate::stop::Stop;
use crate::trouble::Trouble;

/// What may be under way on one stream: enough to fill a fast network, little enough that the faster streams get more.
const WINDOW_BYTES: u64 = 16 << 20;
/// Windows are counted in units, since a semaphore counts in u32; a small request costs one all the same.
const UNIT_BYTES: u64 = 64 << 10;
/// As much as a socket takes at once, or a few large blocks of a KV cache.
const TOGETHER_BYTES: usize = 256 << 10;
/// After a failed dial the other slots are preferred for this long: one dead NIC must not draw every retry.
const SHUN: Duration = Duration::from_secs(1);

/// How connections to a node are made.
#[derive(Clone, Debug)]
pub(crate) struct Ways {
    pub transport: Transport,
    /// Local addresses to connect from; empty: whatever the routes say.
    pub nics: Vec<IpAddr>,
    /// Connections per NIC.
    pub streams: usize,
}

pub(crate) struct Link {
    node: Option<String>,
    transport: Transport,
    addresses: RwLock<Vec<Address>>,
    slots: Vec<Slot>,
    window: Arc<Semaphore>,
    /// For memory that the node can't map; made when it is first needed, and anew after it was retired.
    ring: Mutex<Option<Arc<Ring>>>,
    caller: Arc<Caller>,
    stats: Arc<Stats>,
}

struct Slot {
    number: u32,
    nic: Option<IpAddr>,
    current: Mutex<Option<Arc<Connection>>>,
    /// When the last dial failed, and why. Held while dialing, so that one dials for all who wait.
    dialing: tokio::sync::Mutex<()>,
    failed: Mutex<Option<(Instant, Trouble)>>,
    /// Generation of the last successful HELLO.
    established: AtomicU64,
    /// Highest generation that ended with a write unanswered.
    doubted: Arc<AtomicU64>,
    outstanding: AtomicUsize,
    /// Of large transfers, the last ones counting most; 0 before the first.
    bytes_per_s: AtomicU64,
}

/// A slot chosen for a transfer, and the bytes it counts there.
pub(crate) struct Lane {
    link: Arc<Link>,
    slot: usize,
    bytes: usize,
    /// When, and how many bytes were under way before.
    begun: Option<(Instant, usize)>,
}

/// What a slot promises.
struct Load {
    shunned: bool,
    bytes: usize,
    /// 0: not known yet.
    bytes_per_s: u64,
}

/// The index of the slot that will be free first. Small requests keep to the first slots as long as little is under way there:
/// what travels together costs fewer system calls.
fn soonest(loads: impl Iterator<Item = Load> + Clone) -> usize {
    // A slot that nobody has measured is taken for as fast as the fastest, so that it will be.
    let fastest = loads.clone().map(|load| load.bytes_per_s).max().filter(|speed| *speed > 0).unwrap_or(1);
    let wait = |load: &Load| {
        let speed = if load.bytes_per_s == 0 { fastest } else { load.bytes_per_s };
        let waiting = (load.bytes / TOGETHER_BYTES * TOGETHER_BYTES) as u64;
        waiting.saturating_mul(1_000_000) / speed
    };
    let ranked = loads.enumerate().map(|(index, load)| (load.shunned, wait(&load), index));
    ranked.min().expect("a link has at least one slot").2
}

impl Link {
    pub fn new(
        node: Option<String>,
        addresses: Vec<Address>,
        ways: &Ways,
        caller: Arc<Caller>,
        stats: Arc<Stats>,
    ) -> Link {
        let Ways { transport, nics, streams } = ways;
        let nics: Vec<Option<IpAddr>> =
            if nics.is_empty() { vec![None] } else { nics.iter().copied().map(Some).collect() };
        // Neighbouring slots use different NICs, so that few requests already use all of them.
        let slots: Vec<Slot> = (0..streams * nics.len())
            .map(|index| Slot::new(index as u32, nics[index % nics.len()]))
            .collect();
        let window = Arc::new(Semaphore::new(slots.len() * (WINDOW_BYTES / UNIT_BYTES) as usize));
        let transport = *transport;
        Link {
            node,
            transport,
            addresses: RwLock::new(addresses),
            slots,
            window,
            ring: Mutex::default(),
            caller,
            stats,
        }
    }

    /// A node that came back may listen elsewhere.
    pub fn update_addresses(&self, addresses: &[Address]) {
        if *self.addresses.read() != addresses {
            *self.addresses.write() = addresses.to_vec();
        }
    }

    /// Waits until `bytes` more may be under way to this node.
    pub async fn admit(&self, bytes: u64, stop: &mut Stop) -> Result<OwnedSemaphorePermit, Failure> {
        let permit = stop.race(self.window.clone().acquire_many_owned(units(bytes))).await?;
        Ok(permit.expect("the window is never closed"))
    }

    /// The same if nothing has to be waited for.
    pub fn try_admit(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        self.window.clone().try_acquire_many_owned(units(bytes)).ok()
    }

    pub fn is_settled(&self) -> bool {
        !self.slots.iter().any(Slot::is_in_doubt)
    }

    /// Sees to it that no write of an ended connection can still be applied, before another write is sent: every slot that
    /// ended with a write unanswered says HELLO again, which fences its older connections on the node.
    pub async fn settle(&self, stop: &mut Stop) -> Result<(), Trouble> {
        for slot in self.slots.iter().filter(|slot| slot.is_in_doubt()) {
            self.connect(slot, stop).await?;
        }
        Ok(())
    }

    /// The slot on which `bytes` more will have arrived first, by what is under way there and how fast it has been.
    pub fn lane(self: &Arc<Self>, bytes: usize) -> Lane {
        let slot = soonest(self.slots.iter().map(|slot| Load {
            shunned: slot.is_shunned(),
            bytes: slot.outstanding.load(Ordering::Relaxed),
            bytes_per_s: slot.bytes_per_s.load(Ordering::Relaxed),
        }));
        let ahead = self.slots[slot].outstanding.fetch_add(bytes, Ordering::Relaxed);
        // Small ones say nothing of the speed, and their time is not worth a look at the clock.
        let begun = (bytes >= TOGETHER_BYTES).then(|| (Instant::now(), ahead));
        Lane { link: self.clone(), slot, bytes, begun }
    }

    pub fn ring(&self, regions: &Regions) -> Result<Arc<Ring>, Failure> {
        let mut current = self.ring.lock();
        match &*current {
            Some(ring) if !ring.is_retired() => Ok(ring.clone()),
            _ => Ok(current.insert(Arc::new(Ring::new(regions)?)).clone()),
        }
    }

    /// Has the node forget a region that is gone, on every connection.
    fn unmap(&self, region: u32) {
        let current = self.slots.iter().filter_map(Slot::usable);
        current.filter(|connection| connection.is_local()).for_each(|connection| connection.unmap(region));
    }

    pub async fn end(&self) {
        for slot in &self.slots {
            let current = slot.current.lock().take();
            if let Some(connection) = current {
                connection.end().await;
            }
        }
    }

    async fn connect(&self, slot: &Slot, stop: &mut Stop) -> Result<Arc<Connection>, Trouble> {
        if let Some(connection) = slot.usable() {
            return Ok(connection);
        }
        let asked = Instant::now();
        let _dialing = stop.race(slot.dialing.lock()).await.map_err(Trouble::Stopped)?;
        if let Some(connection) = slot.usable() {
            return Ok(connection);
        }
        // Whoever waited while another dialed in vain shares that result: a crowd must not time out one after the other.
        let failed = slot.failed.lock().clone();
        if let Some((_, trouble)) = failed.filter(|(at, _)| *at >= asked) {
            return Err(trouble);
        }
        let addresses = self.addresses.read().clone();
        let whom = Whom { node: self.node.as_deref(), addresses: &addresses, transport: self.transport };
        let dial = self.caller.dial(whom, slot.nic, slot.number);
        let dialed = match stop.race(dial).await.map_err(Trouble::Stopped)? {
            Ok(dialed) => dialed,
            Err(trouble) => {
                *slot.failed.lock() = Some((Instant::now(), trouble.clone()));
                return Err(trouble);
            }
        };
        add(&self.stats.connections_opened, 1);
        slot.failed.lock().take();
        slot.established.store(dialed.generation, Ordering::SeqCst);
        let connection = Connection::start(dialed, slot.doubted.clone());
        *slot.current.lock() = Some(connection.clone());
        Ok(connection)
    }
}

fn units(bytes: u64) -> u32 {
    bytes.div_ceil(UNIT_BYTES).clamp(1, WINDOW_BYTES / UNIT_BYTES) as u32
}

impl Slot {
    fn new(number: u32, nic: Option<IpAddr>) -> Slot {
        Slot {
            number,
            nic,
            current: Mutex::default(),
            dialing: tokio::sync::Mutex::default(),
            failed: Mutex::default(),
            established: AtomicU64::new(0),
            doubted: Arc::default(),
            outstanding: AtomicUsize::new(0),
            bytes_per_s: AtomicU64::new(0),
        }
    }

    fn usable(&self) -> Option<Arc<Connection>> {
        self.current.lock().as_ref().filter(|connection| connection.is_usable()).cloned()
    }

    fn is_in_doubt(&self) -> bool {
        let doubted = self.doubted.load(Ordering::SeqCst);
        doubted > 0 && doubted >= self.established.load(Ordering::SeqCst)
    }

    fn is_shunned(&self) -> bool {
        self.failed.lock().as_ref().is_some_and(|(at, _)| at.elapsed() < SHUN)
    }
}

impl Lane {
    /// The connection of its slot, made if there is none.
    pub async fn connection(&self, stop: &mut Stop) -> Result<Arc<Connection>, Trouble> {
        self.link.connect(&self.link.slots[self.slot], stop).await
    }

    /// All of it has arrived: what that says about the slot's speed is kept.
    pub fn arrived(&self) {
        let Some((begun, ahead)) = self.begun else { return };
        let seconds = begun.elapsed().as_secs_f64().max(1e-6);
        let sample = ((ahead + self.bytes) as f64 / seconds) as u64;
        let speed = &self.link.slots[self.slot].bytes_per_s;
        let before = speed.load(Ordering::Relaxed);
        // One transfer that met a busy machine must not send all others elsewhere.
        speed.store(
            if before == 0 { sample } else { before - before / 8 + sample / 8 }.max(1),
            Ordering::Relaxed,
        );
    }

    /// The connection of its slot if there is one.
    pub fn usable(&self) -> Option<Arc<Connection>> {
        self.link.slots[self.slot].usable()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.link.slots[self.slot].outstanding.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The links of one client, by node.
#[derive(Default)]
pub(crate) struct Links {
    links: Mutex<std::collections::HashMap<String, Arc<Link>>>,
}

/// Links stay: forgetting one would forget its doubts. A cluster of more nodes than this needs another plan anyway.
const LINKS_MAX: usize = 1024;

impl Links {
    pub fn get(&self, name: &str, make: impl FnOnce() -> Link) -> Result<Arc<Link>, Failure> {
        let mut links = self.links.lock();
        if let Some(link) = links.get(name) {
            return Ok(link.clone());
        }
        if links.len() >= LINKS_MAX {
            return Err(Failure::new(
                Code::Overloaded,
                format!("one client speaks to at most {LINKS_MAX} nodes"),
            ));
        }
        let link = Arc::new(make());
        links.insert(name.into(), link.clone());
        Ok(link)
    }

    pub fn find(&self, name: &str) -> Option<Arc<Link>> {
        self.links.lock().get(name).cloned()
    }

    pub fn unmap(&self, region: u32) {
        self.links.lock().values().for_each(|link| link.unmap(region));
    }

    /// All connections that there are.
    pub fn connections(&self) -> Vec<Arc<Connection>> {
        let links = self.links.lock();
        let slots = links.values().flat_map(|link| &link.slots);
        slots.filter_map(|slot| slot.current.lock().clone()).collect()
    }

    pub async fn end(&self) {
        let links: Vec<Arc<Link>> = self.links.lock().values().cloned().collect();
        for link in links {
            link.end().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(loads: &[(bool, usize, u64)]) -> usize {
        soonest(loads.iter().map(|(shunned, bytes, bytes_per_s)| Load {
            shunned: *shunned,
            bytes: *bytes,
            bytes_per_s: *bytes_per_s,
        }))
    }

    #[test]
    fn the_slot_that_will_be_free_first() {
        const MIB: usize = 1 << 20;
        assert_eq!(pick(&[(false, 2 * MIB, 0), (false, MIB, 0)]), 1, "by what is under way");
        assert_eq!(pick(&[(false, 4 * MIB, 4_000_000), (false, 2 * MIB, 1_000_000)]), 0, "by the speed");
        assert_eq!(
            pick(&[(false, 2 * MIB, 1_000_000), (false, 2 * MIB, 0)]),
            0,
            "an unknown one is no better"
        );
        assert_eq!(pick(&[(false, 3 * MIB, 1_000_000), (false, 2 * MIB, 0)]), 1, "and no worse");
        assert_eq!(pick(&[(false, 100_000, 0), (false, 0, 0)]), 0, "small ones travel together");
        assert_eq!(pick(&[(true, 0, 9_000_000), (false, 9 * MIB, 1)]), 1, "a dead one last of all");
    }
}
