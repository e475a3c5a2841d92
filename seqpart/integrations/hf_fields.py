"""What becomes of each field of transformers' TrainingArguments: it is honoured, has no effect, or is refused by name."""

from collections.abc import Mapping


def _each(names: str, reason: str = "") -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


HONOURED = frozenset(
    _each(
        "output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate "
        "lr_scheduler_type lr_scheduler_kwargs warmup_steps optim weight_decay adam_beta1 adam_beta2 adam_epsilon "
        "max_grad_norm bf16 tf32 seed data_seed full_determinism train_sampling_strategy dataloader_drop_last "
        "dataloader_num_workers remove_unused_columns label_names eval_strategy eval_steps eval_on_start "
        "per_device_eval_batch_size prediction_loss_only load_best_model_at_end metric_for_best_model greater_is_better "
        "logging_strategy logging_steps logging_first_step report_to disable_tqdm save_strategy save_steps use_cpu"
    )
)
WITHOUT_EFFECT: Mapping[str, str] = {
    **_each(
        "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs "
        "torch_empty_cache_steps auto_find_batch_size",
        "the plan decides what memory holds",
    ),
    "eval_accumulation_steps": "predictions wait in files",
    **_each(
        "local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
        "ddp_timeout average_tokens_across_devices eval_use_gather_object log_on_each_node log_level_replica save_on_each_node",
        "one process trains",
    ),
    **_each(
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order",
        "seqpart starts and feeds the processes that read rows",
    ),
    **_each(
        "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision", "nothing is pushed to the hub"
    ),
    **_each("do_train do_eval do_predict resume_from_checkpoint", "scripts read them, and transformers' Trainer does not"),
    **_each(
        "save_total_limit save_only_model enable_jit_checkpoint",
        "checkpoints are seqpart's: two are kept, whole, and a signal leaves one",
    ),
    "length_column_name": "rows are not grouped by length",
    "log_level": "seqpart speaks through logging.getLogger('seqpart')",
    "logging_nan_inf_filter": "a loss that is not finite ends the run",
}
"""And why."""
CURES: Mapping[str, str] = {
    "fp16": "bf16=True is there",
    "skip_memory_metrics": "trainer.result.proof says what memory was taken",
    "use_cache": "a forward pass in training keeps no cache",
    "label_smoothing_factor": "seqpart.Trainer(model, loss) takes any function of output and labels",
    "optim_args": "give optimizer_cls_and_kwargs to the Trainer",
    "run_name": "trackers call a run by its directory",
    "push_to_hub": "push what save_model wrote",
}
"""Of fields that are refused: what to do instead."""
