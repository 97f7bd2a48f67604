-- The tables of the first release, as `m009_schema` makes them.

-- What was asked and answered, so that feedback can name it.
CREATE TABLE completions (
    id TEXT PRIMARY KEY,
    created_at TEXT NOT NULL,
    object TEXT NOT NULL CHECK (object IN ('chat.completion', 'text_completion')),
    user TEXT,
    adapter TEXT,
    version INTEGER NOT NULL,
    model TEXT NOT NULL,
    messages TEXT,
    prompt TEXT,
    prompt_key TEXT NOT NULL,
    prompt_ids TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    choice_count INTEGER NOT NULL
);
CREATE INDEX completions_by_prompt ON completions (prompt_key);
CREATE TABLE choices (
    completion_id TEXT NOT NULL REFERENCES completions (id) ON DELETE CASCADE,
    choice INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    queue_ms REAL NOT NULL,
    ttft_ms REAL NOT NULL,
    total_ms REAL NOT NULL,
    PRIMARY KEY (completion_id, choice)
);

-- What users did, and the preference pairs that follow from it.
CREATE TABLE signals (
    id TEXT PRIMARY KEY,
    created_at TEXT NOT NULL,
    completion_id TEXT REFERENCES completions (id),
    choice INTEGER,
    user TEXT NOT NULL,
    signal TEXT NOT NULL,
    text TEXT,
    seconds REAL,
    pair_ids TEXT NOT NULL,
    reason TEXT NOT NULL
);
CREATE INDEX signals_by_completion ON signals (completion_id, choice);
CREATE TABLE pairs (
    id INTEGER PRIMARY KEY,
    created_at TEXT NOT NULL,
    adapter TEXT NOT NULL,
    signal_id TEXT NOT NULL REFERENCES signals (id),
    source TEXT NOT NULL,
    weight REAL NOT NULL,
    messages TEXT,
    prompt TEXT,
    prompt_key TEXT NOT NULL,
    chosen TEXT NOT NULL,
    rejected TEXT NOT NULL,
    prompt_ids TEXT,
    chosen_ids TEXT,
    rejected_ids TEXT,
    chosen_completion_id TEXT REFERENCES completions (id),
    chosen_choice INTEGER,
    rejected_completion_id TEXT REFERENCES completions (id),
    rejected_choice INTEGER,
    state TEXT NOT NULL CHECK (state IN ('queued', 'held_out', 'trained', 'learnt', 'skipped', 'quarantined')),
    epochs_done INTEGER NOT NULL DEFAULT 0,
    trained_version INTEGER,
    ref_chosen_logp REAL,
    ref_rejected_logp REAL,
    ref_model TEXT,
    note TEXT NOT NULL DEFAULT ''
);
CREATE INDEX pairs_by_adapter ON pairs (adapter, state);
CREATE INDEX pairs_by_signal ON pairs (signal_id);
CREATE INDEX pairs_by_prompt ON pairs (prompt_key);
CREATE INDEX pairs_by_chosen ON pairs (chosen_completion_id);
CREATE INDEX pairs_by_rejected ON pairs (rejected_completion_id);

-- What each adapter's versions are, how well they do, and the steps that were not taken.
CREATE TABLE adapter_versions (
    adapter TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at TEXT NOT NULL,
    parent INTEGER NOT NULL,
    reason TEXT NOT NULL,
    pairs INTEGER NOT NULL,
    loss REAL,
    grad_norm REAL,
    step_s REAL NOT NULL,
    path TEXT,
    on_disk INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (adapter, version)
);
CREATE TABLE alignment_metrics (
    id INTEGER PRIMARY KEY,
    created_at TEXT NOT NULL,
    adapter TEXT NOT NULL,
    version INTEGER NOT NULL,
    pair_id INTEGER NOT NULL REFERENCES pairs (id),
    split TEXT NOT NULL CHECK (split IN ('prequential', 'held_out')),
    chosen_logp REAL NOT NULL,
    rejected_logp REAL NOT NULL,
    ref_chosen_logp REAL NOT NULL,
    ref_rejected_logp REAL NOT NULL,
    win INTEGER NOT NULL,
    logp_difference REAL NOT NULL,
    reward_margin REAL NOT NULL,
    reward_correct INTEGER NOT NULL,
    loss REAL NOT NULL,
    kl_nats REAL
);
CREATE INDEX metrics_by_adapter ON alignment_metrics (adapter, split, version);
CREATE INDEX metrics_by_pair ON alignment_metrics (pair_id);
CREATE TABLE skipped_steps (
    id INTEGER PRIMARY KEY,
    created_at TEXT NOT NULL,
    adapter TEXT NOT NULL,
    version INTEGER NOT NULL,
    pair_ids TEXT NOT NULL,
    reason TEXT NOT NULL
);

-- A bounded sample of the engine's iterations.
CREATE TABLE iteration_samples (
    id INTEGER PRIMARY KEY,
    created_at TEXT NOT NULL,
    prefill_tokens INTEGER NOT NULL,
    decode_tokens INTEGER NOT NULL,
    finetune_tokens INTEGER NOT NULL,
    finetune_units INTEGER NOT NULL,
    latency_ms REAL NOT NULL,
    predicted_ms REAL NOT NULL,
    budget_ms REAL,
    free_pages INTEGER NOT NULL
);

-- Which base model the learning tables speak of.
CREATE TABLE served_base (fingerprint TEXT NOT NULL);

-- Where the versions and skipped steps of other base models wait.
CREATE TABLE shelved_versions (
    base TEXT NOT NULL,
    adapter TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at TEXT NOT NULL,
    parent INTEGER NOT NULL,
    reason TEXT NOT NULL,
    pairs INTEGER NOT NULL,
    loss REAL,
    grad_norm REAL,
    step_s REAL NOT NULL,
    path TEXT,
    on_disk INTEGER NOT NULL,
    PRIMARY KEY (base, adapter, version)
);
CREATE TABLE shelved_steps (
    base TEXT NOT NULL,
    id INTEGER NOT NULL,
    created_at TEXT NOT NULL,
    adapter TEXT NOT NULL,
    version INTEGER NOT NULL,
    pair_ids TEXT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (base, id)
);

-- Where the scores of pairs on other base models wait, and how far the pairs had come there.
CREATE TABLE shelved_metrics (
    base TEXT NOT NULL,
    id INTEGER NOT NULL,
    created_at TEXT NOT NULL,
    adapter TEXT NOT NULL,
    version INTEGER NOT NULL,
    pair_id INTEGER NOT NULL REFERENCES pairs (id) ON DELETE CASCADE,
    split TEXT NOT NULL,
    chosen_logp REAL NOT NULL,
    rejected_logp REAL NOT NULL,
    ref_chosen_logp REAL NOT NULL,
    ref_rejected_logp REAL NOT NULL,
    win INTEGER NOT NULL,
    logp_difference REAL NOT NULL,
    reward_margin REAL NOT NULL,
    reward_correct INTEGER NOT NULL,
    loss REAL NOT NULL,
    kl_nats REAL,
    PRIMARY KEY (base, id)
);
CREATE INDEX shelved_metrics_by_pair ON shelved_metrics (pair_id);
CREATE TABLE shelved_progress (
    base TEXT NOT NULL,
    pair_id INTEGER NOT NULL REFERENCES pairs (id) ON DELETE CASCADE,
    state TEXT NOT NULL,
    epochs_done INTEGER NOT NULL,
    trained_version INTEGER,
    ref_chosen_logp REAL,
    ref_rejected_logp REAL,
    ref_model TEXT,
    note TEXT NOT NULL,
    PRIMARY KEY (base, pair_id)
);
CREATE INDEX shelved_progress_by_pair ON shelved_progress (pair_id);

-- Pairs that look poisoned, until somebody decides.
CREATE TABLE quarantine (
    pair_id INTEGER PRIMARY KEY REFERENCES pairs (id) ON DELETE CASCADE,
    created_at TEXT NOT NULL,
    adapter TEXT NOT NULL,
    reason TEXT NOT NULL,
    decision TEXT CHECK (decision IN ('released', 'dropped')),
    decided_at TEXT
);
CREATE INDEX quarantine_by_adapter ON quarantine (adapter, decision);

-- Adapters that are being forgotten: what was begun is ended by the next start.
CREATE TABLE forgetting (adapter TEXT PRIMARY KEY, started_at TEXT NOT NULL);
