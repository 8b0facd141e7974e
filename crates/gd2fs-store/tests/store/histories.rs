//! Views, unpublished writes, overwrites, grants and seals in any order, against a plain byte array.

use super::*;

const BIG: u32 = 1 << 20;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

fn big(grant: u64) -> Capability {
    Capability { stripe_unit: BIG, ..capability(grant, 1, 1) }
}

fn one_history(seed: u64, granted: bool) {
    let bench = Bench::new(256 << 20);
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut grant = u64::from(granted);
    let column = now(bench.store.open(&big(grant), 0)).unwrap().0;
    let total = 2 * BIG as usize;
    let (mut bytes, mut valid) = (vec![0u8; total], vec![false; total]);
    let mut sealed = 0usize;
    let mut views = Vec::new();
    let mut tickets: Vec<(gd2fs_store::WriteTicket, usize, Vec<u8>, u64)> = Vec::new();
    for step in 0..300u32 {
        let chunk = random.below(2) as usize * BIG as usize;
        let mut start = random.below(u64::from(BIG)) as usize;
        let mut length =
            (random.below(5) * random.below(if step % 3 == 0 { 9000 } else { 300_000 })) as usize + 1;
        if random.below(3) == 0 {
            (start, length) = (start / 4096 * 4096, length.div_ceil(4096) * 4096);
        }
        if random.below(8) == 0 {
            (start, length) = (0, BIG as usize);
        }
        let (start, end) = (chunk + start, (chunk + start + length).min(chunk + BIG as usize));
        match random.below(12) {
            0..=4 => {
                let data = pattern(end - start, random.below(256) as u8);
                match write(&column, grant, start as u64, &data) {
                    Ok(()) => {
                        assert!(start >= sealed);
                        if granted {
                            assert!(
                                (start..end).all(|at| !valid[at] || bytes[at] == data[at - start]),
                                "write once"
                            );
                        }
                        bytes[start..end].copy_from_slice(&data);
                        valid[start..end].fill(true);
                    }
                    Err(f) if f.code == Code::Sealed => assert!(start < sealed),
                    Err(f) if f.code == Code::StaleWriter => {
                        assert!(granted && (start..end).any(|at| valid[at] && bytes[at] != data[at - start]));
                    }
                    Err(f) => panic!("seed {seed} step {step}: {f}"),
                }
            }
            5..=7 => {
                let top = valid.iter().rposition(|v| *v).map_or(0, |i| i + 1);
                let stop = end.min(top.max(start));
                match now(column.read(1, start as u64, (end - start) as u32, true)) {
                    Ok(view) => {
                        assert!(view.bytes() == &bytes[start..stop], "seed {seed} step {step}: wrong bytes");
                        assert!(valid[start..stop].iter().all(|v| *v));
                        if stop > start {
                            assert_eq!(
                                view.sums,
                                sums::piece_sums(start as u64, view.bytes()),
                                "seed {seed} step {step}"
                            );
                        }
                        if random.below(3) == 0 && views.len() < 6 {
                            let copy = view.bytes().to_vec();
                            views.push((view, copy));
                        }
                    }
                    Err(f) => {
                        assert_eq!(f.code, Code::Hole, "seed {seed} step {step}: {f}");
                        assert!(valid[start..stop].contains(&false), "seed {seed} step {step}");
                    }
                }
            }
            8 => {
                if let Ok(ticket) = now(column.begin_write(1, grant, start as u64, (end - start) as u32)) {
                    let data = pattern(end - start, random.below(256) as u8);
                    fill(&ticket, &data);
                    if tickets.len() < 5 {
                        tickets.push((ticket, start, data, grant));
                    }
                }
            }
            9 if !tickets.is_empty() => {
                let index = random.below(tickets.len() as u64) as usize;
                let (ticket, start, data, its) = tickets.swap_remove(index);
                let end = start + data.len();
                if random.below(4) == 0 {
                    continue;
                }
                let expected = sums::piece_sums(start as u64, &data);
                // SAFETY: filled.
                match unsafe { publish(ticket, Some(&expected), || false) } {
                    Ok(()) => {
                        assert!(its == grant && start >= sealed);
                        bytes[start..end].copy_from_slice(&data);
                        valid[start..end].fill(true);
                    }
                    Err(f) if f.code == Code::Sealed => assert!(start < sealed),
                    Err(f) => {
                        assert_eq!(f.code, Code::StaleWriter, "seed {seed} step {step}: {f}");
                        assert!(granted);
                    }
                }
            }
            10 if granted && random.below(4) == 0 => {
                grant += 1;
                now(bench.store.open(&big(grant), 0)).unwrap();
                valid[sealed..].fill(false);
            }
            11 if random.below(6) == 0 => {
                let upto = sealed + random.below(BIG as u64 / 4) as usize;
                let item = SealItem { stripe_unit: BIG, ..super::seal(grant, upto as u64) };
                let all = upto <= total && valid[sealed.min(upto)..upto].iter().all(|v| *v);
                let got = now(bench.store.seal(&item));
                assert_eq!(got.is_ok(), all, "seed {seed} step {step} {got:?}");
                if all {
                    sealed = sealed.max(upto);
                }
            }
            _ => {
                if !views.is_empty() {
                    let index = random.below(views.len() as u64) as usize;
                    let (view, copy) = views.swap_remove(index);
                    assert!(view.bytes() == copy, "seed {seed} step {step}: bytes changed under a view");
                }
            }
        }
        for (view, copy) in &views {
            assert!(view.bytes() == copy, "seed {seed} step {step}: bytes changed under a view");
        }
    }
    drop((views, tickets));
    bench.store.delete(&[(column.file(), 0)]).unwrap();
    assert_eq!(bench.store.arena().used(), 0);
}

#[test]
fn any_history_agrees_with_a_byte_array() {
    // Without grants, and with them.
    for seed in 1..=2 {
        one_history(seed, seed % 2 == 0);
    }
}
