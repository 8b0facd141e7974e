//! Random lives of a store whose logs change from life to life, against the model of [`super::lives`].

use std::time::Duration;

use gd2fs_device::fault::PowerCut;
use gd2fs_store::TierError;

use super::lives::{CHUNKS, Chunk, Dice, look};
use super::tiers::{Disk, PATIENCE, column, get, put, run};
use super::*;

const LOGS_MAX: usize = 3;

/// What befalls the logs between two lives, and how it is to be told.
#[derive(Default)]
struct Fate {
    lost: bool,
    refused: usize,
}

/// Changes the logs and opens the store. Logs that were refused are made anew, as the message says.
async fn next_life(
    disk: &mut Disk,
    dice: &mut Dice,
    absent: &mut Vec<String>,
    made: &mut usize,
) -> (Store, Fate) {
    let mut fate = Fate::default();
    let mut names = disk.names.take().unwrap_or_default();
    match dice.below(6) {
        0 | 1 if names.len() < LOGS_MAX => {
            *made += 1;
            names.push(format!("log{made}"));
        }
        2 if names.len() > 1 => {
            absent.push(names.remove(dice.below(names.len())));
            fate.lost = true;
        }
        3 if names.iter().all(|name| disk.path(name).exists()) => {
            std::fs::remove_file(disk.path(&names[dice.below(names.len())])).unwrap();
            fate.lost = true;
        }
        4 if !absent.is_empty() && names.len() < LOGS_MAX => {
            names.push(absent.remove(dice.below(absent.len())))
        }
        _ => {}
    }
    if dice.below(3) == 0 {
        names.reverse();
    }
    loop {
        disk.names = Some(names.clone());
        match disk.try_open().await {
            Ok(store) => return (store, fate),
            Err(TierError::Stranger { path, .. }) => {
                fate.refused += 1;
                std::fs::remove_file(path).unwrap();
            }
            // One whose file was removed: the node starts once without it, as the message says.
            Err(TierError::Absent { path, .. }) => {
                disk.names = Some(names.iter().filter(|name| disk.path(name) != path).cloned().collect());
                drop(disk.open().await);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Lives of one node. How often a log was refused.
async fn lives(seed: u64) -> usize {
    let mut dice = Dice(seed);
    let mut disk = Disk::new(CHUNKS * UNIT as usize, 32 << 20);
    disk.names = Some(vec!["log0".into()]);
    disk.flush_delay = Duration::from_millis([0, 3, 3_600_000][dice.below(3)]);
    let mut model: Vec<Chunk> = (0..CHUNKS).map(|_| Chunk::new()).collect();
    let (mut absent, mut made, mut refused) = (Vec::new(), 0, 0);
    for round in 0..8 {
        let power = PowerCut::new(seed * 100 + round);
        disk.power = Some(power.clone());
        let (store, fate) = next_life(&mut disk, &mut dice, &mut absent, &mut made).await;
        refused += fate.refused;
        let file = column(&store, 0).await;
        for (index, chunk) in model.iter_mut().enumerate() {
            let context = format!("seed {seed}, round {round}, chunk {index}, logs {:?}", disk.names);
            let found = look(&file, index).await;
            if fate.lost {
                chunk.recover_in_part(&found, &context);
            } else {
                chunk.recover(&found, &context);
            }
        }
        for step in 0..12 + dice.below(12) {
            if dice.below(8) == 0 {
                file.flush().await.unwrap();
                model.iter_mut().for_each(Chunk::settle);
                continue;
            }
            let (index, start) = (dice.below(CHUNKS), dice.below(UNIT as usize - 1));
            let longest = [100, 5000, 300_000][dice.below(3)].min(UNIT as usize - start);
            let length = 1 + dice.below(longest);
            let bytes = pattern(length, dice.below(256) as u8);
            let written = put(&file, 0, (index * UNIT as usize + start) as u64, &bytes).await;
            written.unwrap_or_else(|failure| panic!("seed {seed}, round {round}, step {step}: {failure}"));
            model[index].write(start, &bytes);
        }
        if dice.below(2) == 0 {
            store.close(PATIENCE).await.unwrap();
            model.iter_mut().for_each(Chunk::settle);
        } else {
            power.cut().unwrap();
        }
        drop((file, store));
    }
    refused
}

#[test]
fn whatever_becomes_of_the_logs_no_chunk_is_ever_what_it_was_before() {
    let seeds = std::env::var("GD2FS_STORE_SEEDS").map_or(12, |text| text.parse::<u64>().unwrap());
    let first = std::env::var("GD2FS_STORE_FIRST_SEED").map_or(0, |text| text.parse::<u64>().unwrap());
    let refused: usize = (first..first + seeds).map(|seed| run(lives(seed))).sum();
    assert!(refused > 0 || seeds < 12, "no log ever came back after a life without it");
}

#[test]
fn a_copy_of_a_log_from_an_earlier_life_serves_nothing_that_was_replaced() {
    run(async {
        let mut disk = Disk::new(CHUNKS * UNIT as usize, 32 << 20);
        disk.names = Some(vec!["log".into()]);
        let (log, copy) = (disk.path("log"), disk.path("copy"));
        let directory = disk.path("");
        let checkpoints = || {
            let names = std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
            let is_one = |path: &std::path::PathBuf| {
                path.file_name().unwrap().to_string_lossy().starts_with("checkpoint-")
                    && path.extension().is_none()
            };
            names.filter(is_one).map(|path| std::fs::read(path).unwrap()).collect::<Vec<_>>()
        };
        let another = async |before: &Vec<Vec<u8>>| {
            let wait = async {
                while checkpoints() == *before {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(PATIENCE, wait)
                .await
                .expect("a start makes a checkpoint of what it has scanned");
        };
        // Two lives that are killed: nobody makes a checkpoint at their end.
        for seed in [1, 2] {
            let store = disk.open().await;
            if seed == 2 {
                another(&Vec::new()).await;
            }
            let file = column(&store, 0).await;
            put(&file, 0, 0, &pattern(10_000, seed)).await.unwrap();
            file.flush().await.unwrap();
            drop((file, store));
            if seed == 1 {
                std::fs::copy(&log, &copy).unwrap();
            }
        }
        let before = checkpoints();
        let store = disk.open().await;
        another(&before).await;
        assert_eq!(get(&column(&store, 0).await, 0, 10_000).await.unwrap(), pattern(10_000, 2));
        drop(store);
        std::fs::rename(&copy, &log).unwrap();
        let store = disk.open().await;
        assert!(store.tier_stats().log_records_damaged > 0, "what the checkpoint names is not there");
        let file = column(&store, 0).await;
        assert_eq!(get(&file, 0, 10_000).await.unwrap_err().code, Code::Lost);
    });
}
