//! Lets the module see at run time whether it was optimised: the profile keeps debug assertions on, so they can't tell.

fn main() {
    let level = std::env::var("OPT_LEVEL").expect("cargo sets OPT_LEVEL");
    println!("cargo::rustc-env=GD2FS_OPT_LEVEL={level}");
}
