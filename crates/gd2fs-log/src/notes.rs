//! Notes that wait together are written and made durable together.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::entry::Note;
use crate::error::{LogError, Result};
use crate::inner::Inner;
use crate::record::{Body, NOTES_MAX};
use crate::state::Class;

/// Notes that wait at once; more callers queue up before them. Some 80 groups, or a fraction of a second of any disk.
pub(crate) const WAITING_MAX: usize = 4096;

#[derive(Default)]
pub(crate) struct Waiting {
    queue: VecDeque<(Note, oneshot::Sender<Result<()>>)>,
    committing: bool,
}

impl Inner {
    /// Completes when the note is durable. Once begun it is carried out even if the caller does not wait.
    pub async fn note(self: &Arc<Self>, note: Note) -> Result<()> {
        let _place = self.notes_room.acquire().await.map_err(|_| LogError::Closed)?;
        let (tell, told) = oneshot::channel();
        let begin = {
            let mut waiting = self.notes.lock();
            waiting.queue.push_back((note, tell));
            !std::mem::replace(&mut waiting.committing, true)
        };
        if begin {
            self.runtime.spawn(Arc::clone(self).commit());
        }
        told.await.unwrap_or(Err(LogError::Closed))
    }

    /// Writes group after group until no note waits.
    async fn commit(self: Arc<Self>) {
        loop {
            let group: Vec<_> = {
                let mut waiting = self.notes.lock();
                let count = waiting.queue.len().min(NOTES_MAX);
                waiting.committing = count > 0;
                waiting.queue.drain(..count).collect()
            };
            if group.is_empty() {
                return;
            }
            let body = Body::Notes(group.iter().map(|(note, _)| *note).collect());
            let result = self.append_durably(Class::Note, &body).await;
            for (_, tell) in group {
                let _ = tell.send(result.clone());
            }
        }
    }

    /// Appends a record without payload and makes it durable.
    pub async fn append_durably(self: &Arc<Self>, class: Class, body: &Body) -> Result<()> {
        self.append(self.begin(), class, body, None, None).await?;
        self.sync().await
    }
}
