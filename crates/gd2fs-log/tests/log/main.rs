//! A log on a device that forgets, fails and flips bits, against a model that does not.

mod ahead;
mod damage;
mod foreign;
mod full;
mod outage;
mod power;
mod shelf;
mod writes;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gd2fs_device::fault::{Faults, PowerCut};
use gd2fs_device::{Buffer, Device};
use gd2fs_log::{Log, LogError, Options, Recovered};
use tempfile::TempDir;

use crate::shelf::Shelf;

/// Nothing in these tests may take longer.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// A file that plays the device, and its checkpoint.
pub struct Disk {
    directory: TempDir,
    pub bytes: u64,
    pub payload_bytes_max: u32,
    pub segment_bytes: u64,
    pub checkpoint_records: u64,
}

impl Disk {
    pub fn new(segments: u64, segment_bytes: u64, payload_bytes_max: u32) -> Disk {
        // In memory where there is such a place: a real disk's syncs would be most of the time.
        let memory = std::path::Path::new("/dev/shm");
        let directory = if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() }.unwrap();
        let bytes = segments * segment_bytes + 8192;
        Disk { directory, bytes, payload_bytes_max, segment_bytes, checkpoint_records: 1 << 40 }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    pub fn checkpoint(&self) -> PathBuf {
        self.directory.path().join("checkpoint")
    }

    pub fn options(&self) -> Options {
        Options {
            payload_bytes_max: self.payload_bytes_max,
            segment_bytes: Some(self.segment_bytes),
            checkpoint_records: self.checkpoint_records,
            ..Options::new("cluster", "node", self.checkpoint())
        }
    }

    pub fn device(&self, power_cut: Option<PowerCut>, faults: Option<Faults>) -> Arc<Device> {
        let options = gd2fs_device::Options {
            engine: gd2fs_device::EngineKind::Pool,
            threads: 4,
            direct: false,
            power_cut,
            faults,
            ..gd2fs_device::Options::default()
        };
        Arc::new(Device::create(&self.path(), self.bytes, &options).unwrap())
    }

    pub async fn open(&self, device: Arc<Device>) -> (Log, Recovered) {
        tokio::time::timeout(PATIENCE, Log::open(device, self.options())).await.expect("in time").unwrap()
    }

    /// Opens for looking only: places stay what they are.
    pub async fn look(&self) -> (Arc<Log>, Arc<Shelf>, Recovered) {
        let (log, recovered) = self.open(self.device(None, None)).await;
        let log = Arc::new(log);
        let shelf = Shelf::new(&log, &recovered);
        (log, shelf, recovered)
    }

    /// Opens with an owner that takes over all that was recovered.
    pub async fn shelf(&self, device: Arc<Device>) -> (Arc<Log>, Arc<Shelf>, Recovered) {
        let (log, recovered) = self.open(device).await;
        let log = Arc::new(log);
        let shelf = Shelf::new(&log, &recovered);
        log.start(Arc::downgrade(&shelf) as _);
        (log, shelf, recovered)
    }

    pub async fn refused(&self, options: Options) -> LogError {
        let opened = Log::open(self.device(None, None), options).await;
        opened.expect_err("it must be refused")
    }

    /// Changes bytes of the device's file.
    pub fn change(&self, offset: u64, length: usize, change: impl FnOnce(&mut [u8])) {
        let device = self.device(None, None);
        let first = offset / 4096 * 4096;
        let mut blocks = Buffer::new((offset - first + length as u64).next_multiple_of(4096) as usize);
        device.read_at(first, &mut blocks).unwrap();
        change(&mut blocks[(offset - first) as usize..][..length]);
        device.write_at(first, &blocks).unwrap();
    }
}

pub fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, test).await.expect("no test waits so long") })
}
