//! One contract over every engine, what they do when the system fails them, and how a device is opened.

mod contract;
mod faults;
mod opening;
mod power_cut;

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use gd2fs_device::{BLOCK, Buffer, Device, Done, EngineKind, Options, Result, probe};
use gd2fs_transport::{Memory, Slice};
use tempfile::TempDir;

/// No wait of these tests is longer.
const LIMIT: Duration = Duration::from_secs(20);
const MIB: usize = 1 << 20;

/// A directory, and in it a device of so many bytes.
fn device(bytes: usize, options: &Options) -> (TempDir, Device) {
    let home = tempfile::tempdir().unwrap();
    let device = Device::create(&home.path().join("log"), bytes as u64, options).unwrap();
    (home, device)
}

/// Whether a test of this engine can run here; says so if not.
fn works(engine: EngineKind) -> bool {
    match probe() {
        Err(reason) if engine == EngineKind::Uring => {
            eprintln!("SKIPPED: {reason}");
            false
        }
        _ => true,
    }
}

fn on(engine: EngineKind) -> Options {
    Options { engine, ..Options::default() }
}

/// A callback, and where its result arrives.
fn told() -> (Done, mpsc::Receiver<Result<()>>) {
    let (tell, told) = mpsc::channel();
    (Box::new(move |result| drop(tell.send(result))), told)
}

fn read(device: &Device, offset: usize, length: usize) -> Vec<u8> {
    let mut bytes = Buffer::new(length);
    device.read_at(offset as u64, &mut bytes).unwrap();
    bytes.to_vec()
}

fn filled(length: usize, byte: u8) -> Buffer {
    let mut bytes = Buffer::new(length);
    bytes.fill(byte);
    bytes
}

/// The file's bytes as others see them.
fn on_disk(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

/// A small generator (Marsaglia's xorshift64), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            let drawn = (self.below(usize::MAX) as u64).to_le_bytes();
            word.copy_from_slice(&drawn[..word.len()]);
        }
    }

    /// `slice` cut at random blocks and shuffled.
    fn scatter(&mut self, slice: Slice) -> Memory {
        let mut slices = Vec::new();
        let mut start = 0;
        while start < slice.len() {
            let left = (slice.len() - start) / BLOCK;
            let length = BLOCK * (1 + self.below(left.min(20)));
            slices.push(slice.part(start, length));
            start += length;
        }
        for index in (1..slices.len()).rev() {
            slices.swap(index, self.below(index + 1));
        }
        Memory::new(slices)
    }
}

/// The bytes of a scatter list in its order.
fn gathered(memory: &Memory) -> Vec<u8> {
    // SAFETY: no operation is under way on the tests' memory when they look at it.
    memory.slices().iter().flat_map(|slice| unsafe { slice.bytes() }.to_vec()).collect()
}

/// Reads and writes at random from four threads, each in its quarter, against a model; at the end the whole is compared.
fn against_a_model(device: &Device, seed: u64) {
    let quarter = device.bytes() as usize / 4;
    std::thread::scope(|scope| {
        for index in 0..4 {
            scope.spawn(move || {
                one_quarter(device, index * quarter, quarter, Random(seed * 4 + index as u64 + 1))
            });
        }
    });
}

fn one_quarter(device: &Device, start: usize, length: usize, mut random: Random) {
    use gd2fs_device::Op;
    let mut model = read(device, start, length);
    for turn in 0..60 {
        // Most are short; some are split.
        let most = if turn % 10 == 0 { length } else { 64 * BLOCK };
        let size = BLOCK * (1 + random.below(most / BLOCK));
        let at = BLOCK * random.below((length - size) / BLOCK + 1);
        let mut bytes = Buffer::new(size);
        random.fill(&mut bytes);
        // SAFETY: `bytes` outlives the operation, which is over before it is looked at.
        let memory = random.scatter(unsafe { bytes.slice() });
        let offset = (start + at) as u64;
        match random.below(5) {
            0 | 1 => {
                device.perform_blocking(Op::read(offset, memory.clone(), ())).unwrap();
                assert!(gathered(&memory) == model[at..at + size], "a read of {size} bytes at {offset}");
            }
            2 | 3 => {
                device.perform_blocking(Op::write(offset, memory.clone(), ())).unwrap();
                model[at..at + size].copy_from_slice(&gathered(&memory));
            }
            _ => {
                device.perform_blocking(Op::write_sync(offset, memory.clone(), ())).unwrap();
                model[at..at + size].copy_from_slice(&gathered(&memory));
                device.sync().unwrap();
            }
        }
    }
    assert!(read(device, start, length) == model, "the quarter at {start}");
}
