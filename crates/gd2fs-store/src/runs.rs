//! Which bytes of a chunk are valid, and their sums. Pure arithmetic: the bytes themselves are asked for by callback.

pub use gd2fs_wire::sums::Run;
use gd2fs_wire::sums::{self, PIECE_BYTES};

const PIECE: u32 = PIECE_BYTES as u32;

/// Sorted runs. Neighbours inside a piece are always merged, so every piece of a filled chunk is one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Runs(Vec<Run>);

impl From<Vec<Run>> for Runs {
    /// Runs that were taken out of one of these: sorted and apart.
    fn from(runs: Vec<Run>) -> Runs {
        Runs(runs)
    }
}

impl Runs {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Run> {
        self.0.iter()
    }

    /// The end of the last valid byte, 0 if there is none.
    pub fn end(&self) -> u32 {
        self.0.last().map_or(0, |run| run.end)
    }

    /// The runs that touch `[start, end)`, as indices.
    fn touching(&self, start: u32, end: u32) -> std::ops::Range<usize> {
        let first = self.at(start).unwrap_or_else(|| self.0.partition_point(|run| run.end <= start));
        let last = end.checked_sub(1).and_then(|last| self.at(last)).map(|last| last + 1);
        let last = last.unwrap_or_else(|| self.0.partition_point(|run| run.start < end));
        first..last.max(first)
    }

    /// The run that holds a byte, if it is where it would be with every piece whole: no search through a cold list.
    fn at(&self, byte: u32) -> Option<usize> {
        let index = (byte / PIECE) as usize;
        self.0.get(index).is_some_and(|run| (run.start..run.end).contains(&byte)).then_some(index)
    }

    pub fn touched(&self, start: u32, end: u32) -> &[Run] {
        &self.0[self.touching(start, end)]
    }

    /// The first byte from `start` on that is not valid.
    pub fn covered_to(&self, start: u32) -> u32 {
        let first = self.valid_parts(start, u32::MAX).next();
        first.filter(|(from, _)| *from == start).map_or(start, |(_, upto)| upto)
    }

    /// The valid bytes inside `[start, end)`, as ranges that do not touch each other.
    pub fn valid_parts(&self, start: u32, end: u32) -> impl Iterator<Item = (u32, u32)> {
        let mut runs = self.touched(start, end).iter().peekable();
        std::iter::from_fn(move || {
            let first = runs.next()?;
            let mut upto = first.end;
            while let Some(next) = runs.next_if(|next| next.start == upto) {
                upto = next.end;
            }
            Some((first.start.max(start), upto.min(end)))
        })
    }

    /// Bytes that are valid.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|run| u64::from(run.end - run.start)).sum()
    }

    pub fn as_slice(&self) -> &[Run] {
        &self.0
    }

    pub fn overlaps(&self, start: u32, end: u32) -> bool {
        !self.touched(start, end).is_empty()
    }

    /// The runs that hold `[start, end)`, one a piece; None if a byte of it is not valid.
    pub fn covering(&self, start: u32, end: u32) -> Option<&[Run]> {
        let found = self.touched(start, end);
        let mut at = start;
        for run in found {
            if run.start > at {
                return None;
            }
            at = run.end;
        }
        (at >= end).then_some(found)
    }

    /// The runs of which `[start, end)` takes a part and leaves a part: their bytes must be verified before they are cut,
    /// since the sums of what is left will be new.
    pub fn straddling(&self, start: u32, end: u32) -> impl Iterator<Item = &Run> {
        self.touched(start, end).iter().filter(move |run| run.start < start || run.end > end)
    }

    /// Makes `[start, end)` valid with the sums of its pieces. `sum_of` gives the sum of bytes that stay valid beside it.
    pub fn replace(&mut self, start: u32, end: u32, new: &[u32], mut sum_of: impl FnMut(u32, u32) -> u32) {
        let touched = self.touching(start, end);
        let mut runs = Vec::with_capacity(new.len() + 2);
        if let Some(run) = self.0[touched.clone()].first().filter(|run| run.start < start) {
            runs.push(Run { start: run.start, end: start, crc: sum_of(run.start, start) });
        }
        let mut at = start;
        for (length, crc) in sums::piece_lengths(u64::from(start), u64::from(end - start)).zip(new) {
            runs.push(Run { start: at, end: at + length as u32, crc: *crc });
            at += length as u32;
        }
        assert_eq!(at, end, "one sum for each piece of the range");
        if let Some(run) = self.0[touched.clone()].last().filter(|run| run.end > end) {
            runs.push(Run { start: end, end: run.end, crc: sum_of(end, run.end) });
        }
        // The neighbours that end or begin where the range does may share a piece with it.
        let from = touched.start - usize::from(touched.start > 0);
        let upto = (touched.end + 1).min(self.0.len());
        let around = [&self.0[from..touched.start], &runs, &self.0[touched.end..upto]].concat();
        self.0.splice(from..upto, merged(around));
    }

    /// Drops everything from `end` on. `sum_of` gives the sum of what is left of a run that is cut.
    pub fn truncate(&mut self, end: u32, mut sum_of: impl FnMut(u32, u32) -> u32) {
        self.0.truncate(self.0.partition_point(|run| run.start < end));
        if let Some(run) = self.0.last_mut().filter(|run| run.end > end) {
            *run = Run { start: run.start, end, crc: sum_of(run.start, end) };
        }
    }

    /// The parts of the runs outside `[start, end)`.
    pub fn outside(&self, start: u32, end: u32) -> impl Iterator<Item = (u32, u32)> {
        self.0
            .iter()
            .flat_map(move |run| [(run.start, run.end.min(start)), (run.start.max(end), run.end)])
            .filter(|(from, to)| from < to)
    }
}

fn merged(runs: Vec<Run>) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        match out.last_mut() {
            Some(last) if last.end == run.start && last.start / PIECE == run.start / PIECE => {
                last.crc = sums::combine(last.crc, run.crc, u64::from(run.end - run.start));
                last.end = run.end;
            }
            _ => out.push(run),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use gd2fs_wire::sums::{crc32c, piece_sums};
    use proptest::prelude::*;

    const CHUNK: u32 = 4 * PIECE;

    #[derive(Clone, Debug)]
    enum Step {
        Write(u32, u32, u8),
        Truncate(u32),
    }

    /// Positions that often coincide with each other and with the ends of pieces.
    fn position() -> impl Strategy<Value = u32> {
        prop_oneof![0..=CHUNK, (0..=16u32).prop_map(|i| i * (PIECE / 4)), (0..=4u32).prop_map(|i| i * PIECE)]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            9 => (position(), position(), any::<u8>()).prop_filter_map("empty", |(a, b, seed)| {
                (a != b).then(|| Step::Write(a.min(b), a.max(b), seed))
            }),
            1 => position().prop_map(Step::Truncate),
        ]
    }

    fn check(runs: &Runs, bytes: &[u8], valid: &[bool]) {
        let mut seen = vec![false; valid.len()];
        for pair in runs.0.windows(2) {
            assert!(pair[0].end <= pair[1].start, "sorted and apart");
            let meet = pair[0].end == pair[1].start;
            assert!(
                !meet || pair[0].start / PIECE != pair[1].start / PIECE,
                "neighbours in a piece are merged"
            );
        }
        for run in runs.iter() {
            assert!(run.start < run.end && run.start / PIECE == (run.end - 1) / PIECE, "inside a piece");
            assert_eq!(run.crc, crc32c(&bytes[run.start as usize..run.end as usize]));
            seen[run.start as usize..run.end as usize].fill(true);
        }
        assert!(seen == valid, "the valid bytes are those of the model");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn runs_agree_with_a_plain_byte_array(steps in proptest::collection::vec(step(), 1..24), asks in proptest::collection::vec((position(), position()), 4)) {
            let mut bytes = vec![0u8; CHUNK as usize];
            let mut valid = vec![false; CHUNK as usize];
            let mut runs = Runs::default();
            for step in steps {
                match step {
                    Step::Write(start, end, seed) => {
                        let (from, to) = (start as usize, end as usize);
                        let straddling = valid[from] && from > 0 && valid[from - 1] && start % PIECE != 0
                            || valid[to - 1] && to < valid.len() && valid[to] && end % PIECE != 0;
                        prop_assert_eq!(runs.straddling(start, end).next().is_some(), straddling);
                        prop_assert_eq!(runs.overlaps(start, end), valid[from..to].contains(&true));
                        for (i, byte) in bytes[from..to].iter_mut().enumerate() {
                            *byte = seed.wrapping_add((i as u8).wrapping_mul(31));
                        }
                        valid[from..to].fill(true);
                        let sums = piece_sums(u64::from(start), &bytes[from..to]);
                        runs.replace(start, end, &sums, |a, b| crc32c(&bytes[a as usize..b as usize]));
                    }
                    Step::Truncate(end) => {
                        valid[end as usize..].fill(false);
                        runs.truncate(end, |a, b| crc32c(&bytes[a as usize..b as usize]));
                    }
                }
                check(&runs, &bytes, &valid);
            }
            prop_assert_eq!(runs.end() as usize, valid.iter().rposition(|v| *v).map_or(0, |i| i + 1));
            for (a, b) in asks {
                let (start, end) = (a.min(b), a.max(b));
                if start < end {
                    let all = valid[start as usize..end as usize].iter().all(|v| *v);
                    prop_assert_eq!(runs.covering(start, end).is_some(), all);
                }
                let outside: u32 = runs.outside(start, end).map(|(from, to)| to - from).sum();
                let expected = valid.iter().enumerate().filter(|(i, v)| **v && !(start..end).contains(&(*i as u32))).count();
                prop_assert_eq!(outside as usize, expected);
            }
        }
    }
}
