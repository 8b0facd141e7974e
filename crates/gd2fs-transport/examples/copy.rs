//! What the copy that sums costs over a plain one: memcpy, streaming stores, streaming stores with sums of 32 KiB pieces;
//! between memory of huge pages (a node's arena) and a memfd of 4 KiB pages (a client's), with one thread and with two.
//!
//! `cargo run --release --example copy -p gd2fs-transport [MiB] [rounds]`. Ways are interleaved; medians of all rounds.

use std::hint::black_box;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Instant;

use gd2fs_transport::copy::{copy, copy_pieces};
use gd2fs_transport::{Memory, Slice};
use gd2fs_wire::sums::crc32c;

const HUGE_PAGE: usize = 2 << 20;

/// Mapped for the life of the process.
#[derive(Clone, Copy)]
struct Buffer {
    address: *mut u8,
    bytes: usize,
}

// SAFETY: an address range that lives as long as the process; the threads below share out its parts.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn map(bytes: usize, flags: libc::c_int, descriptor: libc::c_int) -> io::Result<Buffer> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping; the room for alignment is never given back.
        let address =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes + HUGE_PAGE, protection, flags, descriptor, 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = address.cast::<u8>();
        // SAFETY: inside the mapping, which has this much room.
        Ok(Buffer { address: unsafe { address.add(address.align_offset(HUGE_PAGE)) }, bytes })
    }

    fn huge(bytes: usize) -> io::Result<Buffer> {
        let buffer = Buffer::map(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        // SAFETY: the range was just mapped.
        unsafe { libc::madvise(buffer.address.cast(), bytes, libc::MADV_HUGEPAGE) };
        Ok(buffer.filled())
    }

    fn memfd(bytes: usize) -> io::Result<Buffer> {
        // SAFETY: plain system calls on a descriptor that is ours.
        unsafe {
            let memory = libc::memfd_create(c"copy".as_ptr(), libc::MFD_CLOEXEC);
            if memory < 0 {
                return Err(io::Error::last_os_error());
            }
            let memory = OwnedFd::from_raw_fd(memory);
            if libc::ftruncate(memory.as_raw_fd(), (bytes + HUGE_PAGE) as libc::off_t) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Buffer::map(bytes, libc::MAP_SHARED, memory.as_raw_fd())?.filled())
        }
    }

    fn filled(self) -> Buffer {
        // SAFETY: the whole range is mapped, and ours.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) };
        bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i ^ (i >> 11)) as u8);
        self
    }

    /// One of `count` equal parts.
    fn part(&self, index: usize, count: usize) -> Buffer {
        let bytes = self.bytes / count;
        // SAFETY: inside the mapping.
        Buffer { address: unsafe { self.address.add(index * bytes) }, bytes }
    }

    fn memory(&self) -> Memory {
        // SAFETY: mapped for ever; the copies below end before the next begins.
        Memory::new(vec![unsafe { Slice::new(self.address, self.bytes) }])
    }
}

const WAYS: [&str; 3] = ["memcpy", "streaming", "summed"];

fn move_bytes(way: usize, from: Buffer, to: Buffer) {
    // SAFETY: two different buffers of one size, used by this thread only.
    unsafe {
        match way {
            0 => std::ptr::copy_nonoverlapping(from.address, to.address, from.bytes),
            1 => copy(from.address, to.address, from.bytes),
            _ => {
                black_box(copy_pieces(0, &from.memory(), &to.memory(), true));
            }
        }
    }
}

fn gb_per_s(way: usize, from: Buffer, to: Buffer, threads: usize) -> f64 {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for i in 0..threads {
            scope.spawn(move || move_bytes(way, from.part(i, threads), to.part(i, threads)));
        }
    });
    from.bytes as f64 / begun.elapsed().as_secs_f64() / 1e9
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn table(name: &str, from: Buffer, to: Buffer, rounds: usize) {
    for threads in [1, 2] {
        let mut figures = [const { Vec::new() }; WAYS.len()];
        for _ in 0..rounds {
            for (way, figures) in figures.iter_mut().enumerate() {
                figures.push(gb_per_s(way, from, to, threads));
            }
        }
        let [memcpy, streaming, summed] = figures.map(median);
        let ratio = summed / memcpy.max(streaming);
        println!("{name:24} {threads:7} {memcpy:10.1} {streaming:10.1} {summed:10.1} {ratio:12.2}");
    }
}

/// Sums alone, of bytes that stay in the cache.
fn sums(from: Buffer) {
    println!("\n{:24} {:>10} {:>10}", "CRC-32C in the cache", "ns", "GB/s");
    for bytes in [64, 512, 4 << 10, 32 << 10, 256 << 10] {
        // SAFETY: nobody writes the buffer any more.
        let data = unsafe { std::slice::from_raw_parts(from.address, bytes) };
        let calls = (64 << 20) / bytes;
        let ns = median(
            (0..7)
                .map(|_| {
                    let begun = Instant::now();
                    (0..calls).for_each(|_| {
                        black_box(crc32c(black_box(data)));
                    });
                    begun.elapsed().as_nanos() as f64 / calls as f64
                })
                .collect(),
        );
        println!("{bytes:24} {ns:10.1} {:10.1}", bytes as f64 / ns);
    }
}

fn main() -> io::Result<()> {
    let argument = |n: usize, default: usize| {
        std::env::args().nth(n).map_or(default, |text| text.parse().expect("a number"))
    };
    let (bytes, rounds) = (argument(1, 512) << 20, argument(2, 9));
    let (huge, other, memfd) = (Buffer::huge(bytes)?, Buffer::huge(bytes)?, Buffer::memfd(bytes)?);
    println!("GB/s, {} MiB, {rounds} rounds", bytes >> 20);
    println!(
        "{:24} {:>7} {:>10} {:>10} {:>10} {:>12}",
        "from -> to", "threads", WAYS[0], WAYS[1], WAYS[2], "summed/best"
    );
    table("huge -> huge", huge, other, rounds);
    table("huge -> memfd of 4 KiB", huge, memfd, rounds);
    table("memfd of 4 KiB -> huge", memfd, other, rounds);
    sums(huge);
    Ok(())
}
