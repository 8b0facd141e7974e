//! Signed text: `gd2fs1.<key id>.<base64url payload>.<base64url HMAC-SHA256>`. Tokens, capabilities and plans share it.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, Mac};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest, Sha256};
use thiserror::Error;

use crate::capability::{Capability, PlanToken, Token};
use crate::code::{Code, Failure};

const PREFIX: &str = "gd2fs1";
/// The built-in key: it protects nothing and is accepted on loopback only.
pub const DEVELOPMENT_KEY_ID: u8 = 0;
const KEY_BYTES_MIN: usize = 16;
/// A capability of a file with 1,000 columns stays well below this.
const TEXT_BYTES_MAX: usize = 60_000;

#[derive(Debug, Error)]
pub enum SigningError {
    #[error(
        "GD2FS_CLUSTER_KEYS: {0}; write it as ID:HEX[,ID:HEX…] with ids 1..255 and keys of 16 bytes or more"
    )]
    Keys(String),
}

/// What can be signed. Its `typ` keeps one kind of signed text from being taken for another.
pub trait Signed: Serialize + DeserializeOwned {
    const TYP: &'static str;
}

impl Signed for Token {
    const TYP: &'static str = "token";
}

impl Signed for Capability {
    const TYP: &'static str = "cap";
}

impl Signed for PlanToken {
    const TYP: &'static str = "plan";
}

/// The cluster's keys: the first signs, all verify, so that keys rotate without a stop.
#[derive(Clone)]
pub struct Keys {
    keys: Vec<(u8, Vec<u8>)>,
}

impl Keys {
    pub fn development() -> Keys {
        let key = Sha256::digest(b"gd2fs development key: loopback only").to_vec();
        Keys { keys: vec![(DEVELOPMENT_KEY_ID, key)] }
    }

    /// Parses `GD2FS_CLUSTER_KEYS`; an empty text means the development key.
    pub fn parse(text: &str) -> Result<Keys, SigningError> {
        if text.trim().is_empty() {
            return Ok(Keys::development());
        }
        let mut keys: Vec<(u8, Vec<u8>)> = Vec::new();
        for item in text.split(',') {
            let (id, hex) = item
                .trim()
                .split_once(':')
                .ok_or_else(|| SigningError::Keys(format!("item {} has no ':'", keys.len() + 1)))?;
            let id = id
                .parse::<u8>()
                .ok()
                .filter(|id| *id != DEVELOPMENT_KEY_ID && keys.iter().all(|(other, _)| other != id))
                .ok_or_else(|| {
                    SigningError::Keys(format!("key id {id:?} is not a fresh number in 1..255"))
                })?;
            let key = decode_hex(hex).filter(|key| key.len() >= KEY_BYTES_MIN).ok_or_else(|| {
                SigningError::Keys(format!("key {id} is not hex of {KEY_BYTES_MIN} bytes or more"))
            })?;
            keys.push((id, key));
        }
        Ok(Keys { keys })
    }

    pub fn is_development(&self) -> bool {
        self.keys[0].0 == DEVELOPMENT_KEY_ID
    }

    pub fn sign<T: Signed>(&self, payload: &T) -> String {
        let (id, key) = &self.keys[0];
        let json = serde_json::to_vec(payload).expect("plain data serialises");
        let body = format!("{PREFIX}.{id}.{}", URL_SAFE_NO_PAD.encode(json));
        let signature = URL_SAFE_NO_PAD.encode(mac(key, &body).finalize().into_bytes());
        format!("{body}.{signature}")
    }

    /// Checks the signature, then reads the payload; expiry is the caller's to check, it knows the time.
    pub fn verify<T: Signed>(&self, text: &str) -> Result<T, Failure> {
        let refuse = |message: &str| Failure::new(Code::BadSignature, message);
        if text.len() > TEXT_BYTES_MAX {
            return Err(refuse("the signed text is too long"));
        }
        let malformed = || refuse("not a signed text (gd2fs1.KEY.PAYLOAD.SIGNATURE)");
        let (body, signature) = text.rsplit_once('.').ok_or_else(malformed)?;
        let mut parts = body.split('.');
        let (Some(PREFIX), Some(id), Some(payload), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(malformed());
        };
        let id = id.parse::<u8>().map_err(|_| malformed())?;
        let (_, key) = self
            .keys
            .iter()
            .find(|(known, _)| *known == id)
            .ok_or_else(|| refuse("signed with a key that is not in GD2FS_CLUSTER_KEYS here"))?;
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| malformed())?;
        // verify_slice compares in constant time.
        mac(key, body).verify_slice(&signature).map_err(|_| refuse("the signature does not match"))?;
        let json = URL_SAFE_NO_PAD.decode(payload).map_err(|_| malformed())?;
        let misunderstood = |why: &str| refuse(&format!("signed, but not understood: {why}"));
        let mut payload: Value =
            serde_json::from_slice(&json).map_err(|error| misunderstood(&error.to_string()))?;
        // serde writes the tag of a struct but does not read it.
        match payload.as_object_mut().and_then(|fields| fields.remove("typ")) {
            Some(typ) if typ == T::TYP => {}
            typ => return Err(misunderstood(&format!("typ is {typ:?} where {:?} is needed", T::TYP))),
        }
        serde_json::from_value(payload).map_err(|error| misunderstood(&error.to_string()))
    }
}

fn mac(key: &[u8], body: &str) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    mac.update(body.as_bytes());
    mac
}

fn decode_hex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        return None;
    }
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::Role;

    #[test]
    fn signed_texts_come_back_and_are_not_taken_for_each_other() {
        let keys =
            Keys::parse("2:000102030405060708090a0b0c0d0e0f,1:ffffffffffffffffffffffffffffffff").unwrap();
        let token = Token { tenant: "t".into(), role: Role::Client, expiry: 5 };
        let text = keys.sign(&token);
        assert!(text.starts_with("gd2fs1.2."));
        assert_eq!(keys.verify::<Token>(&text).unwrap(), token);
        assert_eq!(keys.verify::<Capability>(&text).unwrap_err().code, Code::BadSignature);
        let rotated =
            Keys::parse("3:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa,2:000102030405060708090a0b0c0d0e0f").unwrap();
        assert_eq!(rotated.verify::<Token>(&text).unwrap(), token);
        assert_eq!(Keys::development().verify::<Token>(&text).unwrap_err().code, Code::BadSignature);
        for at in (0..text.len()).filter(|at| text.as_bytes()[*at] != b'.') {
            let mut bad = text.clone().into_bytes();
            bad[at] = if bad[at] == b'A' { b'B' } else { b'A' };
            let bad = String::from_utf8(bad).unwrap();
            assert!(keys.verify::<Token>(&bad).is_err(), "character {at}");
        }
    }

    #[test]
    fn unknown_fields_are_refused() {
        #[derive(Serialize, serde::Deserialize)]
        struct Newer {
            typ: String,
            tenant: String,
            role: Role,
            expiry: u64,
            only_on_sundays: bool,
        }
        impl Signed for Newer {
            const TYP: &'static str = "token";
        }
        let newer = Newer {
            typ: "token".into(),
            tenant: "t".into(),
            role: Role::Client,
            expiry: 5,
            only_on_sundays: true,
        };
        let keys = Keys::development();
        let error = keys.verify::<Token>(&keys.sign(&newer)).unwrap_err();
        assert!(error.message.contains("only_on_sundays"), "{error}");
    }
}
