//! A disk with a cache that its power keeps.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};

use gd2fs_transport::Memory;
use parking_lot::Mutex;

use super::{Dice, SECTOR};
use crate::pool::call;
use crate::workers::Workers;
use crate::{Attempt, BLOCK, Buffer, Engine, Kind};

/// So much stays unsynced (64 MiB a device); beyond it the disk writes its cache back, as a disk may at any time.
const CACHED_SECTORS_MAX: usize = (64 << 20) / SECTOR;
/// Bytes of one system call of a write-back.
const RUN_BYTES_MAX: usize = 1 << 20;

/// The power of the devices that are opened with it.
///
/// Their writes stay in a cache that reads see, and reach the file with a later sync; a durable write reaches it at once.
/// [`PowerCut::cut`] lets any subset of what was not synced reach it, torn at sectors and in any order, and makes every
/// later call fail. A device that is dropped with the power on leaves everything in the file.
#[derive(Clone)]
pub struct PowerCut(Arc<Mutex<State>>);

/// What a cut did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cut {
    /// Writes, or parts of long ones, that were not synced.
    pub writes: usize,
    /// Their sectors.
    pub sectors: usize,
    /// Sectors of which no new version reached the device.
    pub sectors_lost: usize,
}

struct State {
    dice: Dice,
    off: bool,
    disks: Vec<Disk>,
}

struct Disk {
    /// Weak, so that the device's lock ends with the device.
    file: Weak<File>,
    cache: Cache,
}

#[derive(Default)]
struct Cache {
    /// The sectors of each write, by number: which came first does not matter to a disk.
    writes: BTreeMap<u64, Range<u64>>,
    /// Sector to its versions, oldest first.
    sectors: BTreeMap<u64, Vec<Version>>,
    written: u64,
}

struct Version {
    write: u64,
    bytes: [u8; SECTOR],
}

impl PowerCut {
    /// Power that is on; `seed` decides what a cut leaves.
    pub fn new(seed: u64) -> PowerCut {
        PowerCut(Arc::new(Mutex::new(State { dice: Dice(seed), off: false, disks: Vec::new() })))
    }

    /// Cuts the power of all its devices at one moment. To go on, drop them and open them anew with other options, or
    /// [`PowerCut::restore`] it.
    ///
    /// # Errors
    /// Those of writing what survives to the files.
    pub fn cut(&self) -> io::Result<Cut> {
        let State { dice, off, disks } = &mut *self.0.lock();
        let mut cut = Cut::default();
        *off = true;
        for disk in disks {
            let Some(file) = disk.file.upgrade() else { continue };
            let cache = std::mem::take(&mut disk.cache);
            cut.writes += cache.writes.len();
            cut.sectors += cache.sectors.len();
            let surviving = cache.survivors(dice);
            cut.sectors_lost += cache.sectors.len() - surviving.len();
            write_back(&file, &surviving)?;
        }
        Ok(cut)
    }

    /// The power is back: the devices hold what survived, and calls succeed again.
    pub fn restore(&self) {
        self.0.lock().off = false;
    }

    /// Whether the power is cut.
    pub fn is_off(&self) -> bool {
        self.0.lock().off
    }

    /// Sectors that a cut could lose now.
    pub fn sectors_unsynced(&self) -> usize {
        self.0.lock().disks.iter().map(|disk| disk.cache.sectors.len()).sum()
    }

    /// Turns one stored bit of every device, synced or not, as a disk that rots would; with the power on or off. `offset` is
    /// in bytes and `bit` is 0 to 7.
    ///
    /// # Errors
    /// Those of reading and writing the files.
    pub fn rot(&self, offset: u64, bit: u8) -> io::Result<()> {
        for disk in &mut self.0.lock().disks {
            let Some(file) = disk.file.upgrade() else { continue };
            let (sector, byte) = (offset / SECTOR as u64, (offset % SECTOR as u64) as usize);
            for version in disk.cache.sectors.get_mut(&sector).into_iter().flatten() {
                version.bytes[byte] ^= 1 << bit;
            }
            let block = Buffer::new(BLOCK);
            // SAFETY: `block` outlives the calls; between them it is ours alone.
            let memory: Memory = unsafe { block.slice() }.into();
            let start = offset - offset % BLOCK as u64;
            call(&file, Kind::Read, start, &memory)?;
            let one = memory.split([(offset - start) as usize, 1]).remove(1).slices()[0];
            // SAFETY: as above.
            unsafe { one.fill_from(&[one.bytes()[0] ^ (1 << bit)]) };
            call(&file, Kind::Write, start, &memory)?;
        }
        Ok(())
    }

    pub(crate) fn engine(&self, file: Arc<File>) -> Box<dyn Engine> {
        let disks = &mut self.0.lock().disks;
        disks.push(Disk { file: Arc::downgrade(&file), cache: Cache::default() });
        let workers = Workers::new("gd2fs-power", 1).expect("a thread for a test");
        Box::new(Powered { power: self.clone(), disk: disks.len() - 1, file, workers })
    }
}

impl fmt::Debug for PowerCut {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("PowerCut").field("off", &self.0.lock().off).finish_non_exhaustive()
    }
}

struct Powered {
    power: PowerCut,
    disk: usize,
    file: Arc<File>,
    workers: Workers,
}

impl Engine for Powered {
    fn name(&self) -> &'static str {
        "power-cut"
    }

    fn start(&self, attempt: Attempt) {
        let (power, disk, file) = (self.power.clone(), self.disk, Arc::clone(&self.file));
        self.workers.run(move || {
            let moved = {
                let State { off, disks, .. } = &mut *power.0.lock();
                let cache = &mut disks[disk].cache;
                if *off {
                    Err(io::Error::from_raw_os_error(libc::EIO))
                } else {
                    cache.carry_out(&file, &attempt)
                }
            };
            drop(file);
            (attempt.done)(moved);
        });
    }

    fn stop(&self) {
        self.workers.stop();
        let State { off, disks, .. } = &mut *self.power.0.lock();
        if !*off && let Err(error) = disks[self.disk].cache.flush(&self.file) {
            tracing::error!("the cache of a test's disk could not be written back: {error}");
        }
    }
}

impl Cache {
    fn carry_out(&mut self, file: &File, attempt: &Attempt) -> io::Result<usize> {
        let Attempt { kind, offset, memory, .. } = attempt;
        let first = offset / SECTOR as u64;
        match kind {
            Kind::Read => {
                let read = call(file, Kind::Read, *offset, memory)?;
                self.show(first, memory);
                Ok(read)
            }
            Kind::Write => {
                self.take(first, memory);
                if self.sectors.len() > CACHED_SECTORS_MAX {
                    self.flush(file)?;
                }
                Ok(memory.len())
            }
            Kind::WriteSync => {
                let written = call(file, Kind::WriteSync, *offset, memory)?;
                // An older version of these sectors can no longer appear.
                for sector in first..first + (written / SECTOR) as u64 {
                    self.sectors.remove(&sector);
                }
                Ok(written)
            }
            Kind::Sync => {
                self.flush(file)?;
                call(file, Kind::Sync, 0, memory)
            }
        }
    }

    /// Lays cached sectors over what was read from the file.
    fn show(&self, first: u64, memory: &Memory) {
        let count = memory.len() / SECTOR;
        let parts = memory.split((0..count).map(|_| SECTOR));
        for (sector, part) in (first..).zip(parts) {
            if let Some(latest) = self.sectors.get(&sector).and_then(|versions| versions.last()) {
                // SAFETY: memory of a read that is not over: nobody else uses it. Slices hold whole sectors.
                unsafe { part.slices()[0].fill_from(&latest.bytes) };
            }
        }
    }

    fn take(&mut self, first: u64, memory: &Memory) {
        let write = self.written;
        self.written += 1;
        self.writes.insert(write, first..first + (memory.len() / SECTOR) as u64);
        // SAFETY: memory of a write under way, which nobody writes meanwhile.
        let bytes = memory.slices().iter().flat_map(|slice| unsafe { slice.bytes() }.chunks_exact(SECTOR));
        for (sector, bytes) in (first..).zip(bytes) {
            let bytes = bytes.try_into().expect("a sector");
            self.sectors.entry(sector).or_default().push(Version { write, bytes });
        }
    }

    /// Writes the latest of everything to the file.
    fn flush(&mut self, file: &File) -> io::Result<()> {
        let latest =
            self.sectors.iter().filter_map(|(sector, versions)| Some((*sector, &versions.last()?.bytes)));
        write_back(file, &latest.collect())?;
        self.writes.clear();
        self.sectors.clear();
        Ok(())
    }

    /// Rolls for each write whether it is lost, whole or torn, and when it came; answers what each sector ends up with.
    fn survivors<'a>(&'a self, dice: &mut Dice) -> BTreeMap<u64, &'a [u8; SECTOR]> {
        let fates: BTreeMap<u64, (Vec<bool>, u64)> = (self.writes.iter())
            .map(|(write, range)| {
                let count = (range.end - range.start) as usize;
                let reaching = match dice.below(3) {
                    0 => vec![false; count],
                    1 => vec![true; count],
                    _ => dice.tear(count),
                };
                (*write, (reaching, dice.next()))
            })
            .collect();
        let reaches = |sector: u64, version: &Version| {
            fates[&version.write].0[(sector - self.writes[&version.write].start) as usize]
        };
        let ends_with = |(sector, versions): (&u64, &'a Vec<Version>)| {
            let arrived = versions.iter().filter(|version| reaches(*sector, version));
            let last = arrived.max_by_key(|version| fates[&version.write].1)?;
            Some((*sector, &last.bytes))
        };
        self.sectors.iter().filter_map(ends_with).collect()
    }
}

/// Writes sectors to the file in runs of whole blocks, since direct I/O moves no less.
fn write_back(file: &File, sectors: &BTreeMap<u64, &[u8; SECTOR]>) -> io::Result<()> {
    const IN_BLOCK: u64 = (BLOCK / SECTOR) as u64;
    let mut left = sectors.iter().peekable();
    while let Some((first, _)) = left.peek() {
        let start = *first / IN_BLOCK;
        let (mut end, longest) = (start, start + (RUN_BYTES_MAX / BLOCK) as u64);
        let mut run = Vec::new();
        while let Some((sector, bytes)) =
            left.next_if(|(sector, _)| **sector / IN_BLOCK <= end.min(longest - 1))
        {
            end = sector / IN_BLOCK + 1;
            run.push((*sector, *bytes));
        }
        let mut blocks = Buffer::new((end - start) as usize * BLOCK);
        let length = blocks.len();
        // SAFETY: `blocks` outlives the calls and is not used during them.
        let memory: Memory = unsafe { blocks.slice() }.into();
        let offset = start * BLOCK as u64;
        let whole = |moved| if moved == length { Ok(()) } else { Err(io::Error::other("a short transfer")) };
        if run.len() * SECTOR < length {
            whole(call(file, Kind::Read, offset, &memory)?)?;
        }
        for (sector, bytes) in run {
            let at = (sector - start * IN_BLOCK) as usize * SECTOR;
            blocks[at..at + SECTOR].copy_from_slice(bytes);
        }
        whole(call(file, Kind::Write, offset, &memory)?)?;
    }
    Ok(())
}
