//! What a write waits for in a full node of 100,000 columns: `cargo bench -p gd2fs-store --bench evict`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gd2fs_store::{Column, DataDir, Store};
use gd2fs_wire::capability::{Capability, Class, Right};
use gd2fs_wire::sums;

const COLUMNS: u32 = 100_000;
/// A frame for each.
const MEMORY: usize = COLUMNS as usize * (32 << 10);
/// What was used less long ago is not given up.
const SETTLED: Duration = Duration::from_millis(260);

fn main() {
    let directory = tempfile::tempdir().unwrap();
    let data = DataDir::open(directory.path(), "c", "n", 1).unwrap();
    let store = Store::new(MEMORY, data).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut columns = Vec::new();
        for number in 0..COLUMNS {
            columns.push(open(&store, number).await);
            write(&columns[number as usize], 0).await;
        }
        std::thread::sleep(SETTLED);
        let mut waited = Vec::new();
        for number in 0..COLUMNS / 5 {
            // Readers go on: their columns change their places in the order.
            columns[(number as usize * 7919) % columns.len()].warm(0, 1).unwrap();
            let column = open(&store, COLUMNS + number).await;
            let begun = Instant::now();
            write(&column, 0).await;
            waited.push(begun.elapsed());
        }
        waited.sort_unstable();
        let evictions = waited.iter().filter(|took| **took > Duration::from_micros(100)).count();
        let total: Duration = waited.iter().sum();
        let (median, most) = (waited[waited.len() / 2], waited[waited.len() - 1]);
        println!(
            "{} writes into a full node of {COLUMNS} columns: mean {:?}, median {median:?}, most {most:?}; {evictions} took over 100 us",
            waited.len(),
            total / waited.len() as u32
        );
    });
}

async fn open(store: &Store, number: u32) -> Arc<Column> {
    let capability = Capability {
        tenant: "t".into(),
        file: format!("{:032x}", u128::from(number) << 64 | 1),
        class: Class::Cache,
        stripe_unit: 32 << 10,
        width: 1,
        rights: vec![Right::Read, Right::Write],
        ranges: vec![],
        grant: 0,
        columns: vec![(1, 1)],
        nodes: vec![vec!["n".into()]],
        expiry: 0,
        bearer: false,
        priority: (number % 3) as u8,
    };
    store.open(&capability, 0).await.unwrap().0
}

async fn write(column: &Arc<Column>, offset: u64) {
    let ticket = column.begin_write(1, 0, offset, 1).await.unwrap();
    let (address, _) = ticket.target();
    // SAFETY: the target belongs to the ticket, which is alive.
    unsafe { address.write(7) };
    let sums = sums::piece_sums(offset, &[7]);
    // SAFETY: it is written.
    unsafe { ticket.publish(&sums, None, || false) }.await.unwrap();
}
