"""The SGLang plug-in (entry point `sglang.srt.plugins`): registers the drafter's architecture, or says why not."""
