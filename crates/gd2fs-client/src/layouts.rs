//! Layouts that callers use, each with the newer one that control gave in its place.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use gd2fs_wire::code::{Code, Failure};
use parking_lot::Mutex;

use crate::control::Control;
use crate::layout::Layout;
use crate::request::Direction;
use crate::unflushed::Unflushed;

/// Texts remembered; what nobody uses is dropped when there are more.
const CELLS_MAX: usize = 4096;
/// Files remembered by their writes, 100 bytes each. Beyond it those go that nobody uses: first what is flushed, then all, since a
/// client that never flushes asks nobody whether its writes are durable.
const FILES_MAX: usize = 65_536;

pub(crate) struct LayoutCell {
    given: Arc<Layout>,
    newer: [Mutex<Option<Arc<Layout>>>; 2],
    /// Shared by all layouts of the file.
    pub unflushed: Arc<Unflushed>,
    refreshing: tokio::sync::Mutex<()>,
}

impl LayoutCell {
    pub fn new(layout: Layout, unflushed: Arc<Unflushed>) -> LayoutCell {
        let (given, newer) = (Arc::new(layout), Default::default());
        LayoutCell { given, newer, unflushed, refreshing: Default::default() }
    }

    pub fn current(&self, direction: Direction) -> Arc<Layout> {
        self.newer[direction as usize].lock().clone().unwrap_or_else(|| self.given.clone())
    }

    /// Replaces `stale` by what control says now, once for all who found it stale.
    pub async fn refresh(
        &self,
        stale: &Arc<Layout>,
        direction: Direction,
        control: &Control,
        timeout: Duration,
    ) -> Result<(), Failure> {
        let _refreshing = self.refreshing.lock().await;
        if !Arc::ptr_eq(&self.current(direction), stale) {
            return Ok(());
        }
        let rights = match direction {
            Direction::Read => "read",
            Direction::Write => "read,write",
        };
        let path = format!("/v1/fs/layout?file={}&rights={rights}", stale.file);
        let (status, body) = control.call("GET", &path, None, timeout).await?;
        let text = String::from_utf8_lossy(&body);
        if status != 200 {
            return Err(refusal(status, &text));
        }
        let layout = Layout::parse(&text)?;
        let same = |a: &Layout, b: &Layout| {
            a.file == b.file && a.stripe_unit == b.stripe_unit && a.columns.len() == b.columns.len()
        };
        if !same(&layout, stale) {
            return Err(Failure::new(
                Code::Internal,
                "control gave a layout of another shape for the same file",
            ));
        }
        *self.newer[direction as usize].lock() = Some(Arc::new(layout));
        Ok(())
    }
}

/// `{"error": {"code", "name", "message"}}`, or whatever stands in its place.
fn refusal(status: u16, text: &str) -> Failure {
    let json: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
    let error = &json["error"];
    match (error["code"].as_u64(), error["message"].as_str()) {
        (Some(code), Some(message)) => {
            Failure::new(Code::from_u32(u32::try_from(code).unwrap_or(u32::MAX)), message)
        }
        _ => Failure::new(
            Code::Unavailable,
            format!("control answered HTTP {status} to a question for a layout"),
        ),
    }
}

#[derive(Default)]
pub(crate) struct Layouts {
    cells: Mutex<HashMap<String, Arc<LayoutCell>>>,
    /// By file and width.
    files: Mutex<HashMap<(String, usize), Arc<Unflushed>>>,
}

impl Layouts {
    pub fn get(&self, text: &str) -> Result<Arc<LayoutCell>, Failure> {
        let mut cells = self.cells.lock();
        if let Some(cell) = cells.get(text) {
            return Ok(cell.clone());
        }
        let layout = Layout::parse(text)?;
        let unflushed = self.unflushed(&layout);
        let cell = Arc::new(LayoutCell::new(layout, unflushed));
        if cells.len() >= CELLS_MAX {
            cells.retain(|_, cell| Arc::strong_count(cell) > 1);
        }
        // The rest is in use by admitted requests, whose number is bounded too.
        cells.insert(text.into(), cell.clone());
        Ok(cell)
    }

    fn unflushed(&self, layout: &Layout) -> Arc<Unflushed> {
        let mut files = self.files.lock();
        let name = (layout.file.clone(), layout.columns.len());
        if files.len() >= FILES_MAX && !files.contains_key(&name) {
            files.retain(|_, file| Arc::strong_count(file) > 1 || !file.is_clean());
        }
        if files.len() >= FILES_MAX && !files.contains_key(&name) {
            files.retain(|_, file| Arc::strong_count(file) > 1);
        }
        files.entry(name).or_insert_with(|| Arc::new(Unflushed::new(layout.columns.len()))).clone()
    }
}
