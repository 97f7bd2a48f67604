BEGIN TRANSACTION;
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
    on_disk INTEGER NOT NULL DEFAULT 0, restored INTEGER, step_scale REAL NOT NULL DEFAULT 1.0, neutral_nll REAL, neutral_base_nll REAL, tested_at TEXT, problem TEXT, answer TEXT, own_kl_nats REAL,
    PRIMARY KEY (adapter, version)
);
INSERT INTO "adapter_versions" VALUES('ada',1,'2025-01-31T12:00:00.000000+00:00',1,'reason',1,1.5,1.5,1.5,'/var/lib/edged/adapters/base-b/ada/v000001',1,1,1.5,1.5,1.5,'tested_at','problem','answer',1.5);
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
, chosen_tokens INTEGER, rejected_tokens INTEGER);
INSERT INTO "alignment_metrics" VALUES(1,'2025-01-31T12:00:00.000000+00:00','ada',1,1,'held_out',1.5,1.5,1.5,1.5,1,1.5,1.5,1,1.5,1.5,1,1);
CREATE TABLE application_runs (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            user TEXT NOT NULL,
            application TEXT NOT NULL,
            run TEXT NOT NULL,
            features BLOB NOT NULL,
            predicted REAL NOT NULL,
            cost REAL NOT NULL,
            calls INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            answer_tokens INTEGER NOT NULL,
            seconds REAL NOT NULL,
            late_s REAL NOT NULL
        , sharer TEXT);
INSERT INTO "application_runs" VALUES(1,'2025-01-31T12:00:00.000000+00:00','ada','application','run',1,1.5,1.5,1,1,1,1.5,1.5,'sharer');
CREATE TABLE application_salt(salt);
INSERT INTO "application_salt" VALUES(X'5BB77220571968FD63C7C9CBFC7D6D68');
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
    total_ms REAL NOT NULL, repetition REAL, beside TEXT,
    PRIMARY KEY (completion_id, choice)
);
INSERT INTO "choices" VALUES('completions-1',1,'text','[1,2]','finish_reason',1,1,1.5,1.5,1.5,1.5,'beside');
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
, template_arguments TEXT, request_id TEXT);
INSERT INTO "completions" VALUES('completions-1','2025-01-31T12:00:00.000000+00:00','chat.completion','ada','ada',1,'model','[{"role":"user","content":"Grüße 🙂"}]','prompt','prompt_key','[1,2]',1,1,'template_arguments','request_id');
CREATE TABLE federated_consents (
            user TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            account TEXT,
            text_sha256 TEXT NOT NULL
        );
INSERT INTO "federated_consents" VALUES('ada','2025-01-31T12:00:00.000000+00:00','account','text_sha256');
CREATE TABLE federated_ledger (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            user TEXT,
            campaign TEXT NOT NULL,
            round INTEGER NOT NULL,
            start TEXT NOT NULL,
            mode TEXT NOT NULL,
            noise REAL NOT NULL,
            epsilon REAL,
            bytes INTEGER NOT NULL,
            sha256 TEXT NOT NULL UNIQUE,
            nonce TEXT NOT NULL
        );
INSERT INTO "federated_ledger" VALUES(1,'2025-01-31T12:00:00.000000+00:00','ada','campaign',1,'start','mode',1.5,1.5,1,'sha256','nonce');
CREATE TABLE files (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            owner TEXT NOT NULL,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            bytes INTEGER NOT NULL,
            sha256 TEXT NOT NULL
        , expires_at TEXT);
INSERT INTO "files" VALUES('files-1','2025-01-31T12:00:00.000000+00:00','owner','filename','purpose',1,'sha256','expires_at');
CREATE TABLE forgetting (adapter TEXT PRIMARY KEY, started_at TEXT NOT NULL);
INSERT INTO "forgetting" VALUES('ada','started_at');
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
INSERT INTO "iteration_samples" VALUES(1,'2025-01-31T12:00:00.000000+00:00',1,1,1,1,1.5,1.5,1.5,1);
CREATE TABLE job_checkpoints (adapter TEXT PRIMARY KEY, job_id TEXT NOT NULL, step INTEGER NOT NULL, created_at TEXT NOT NULL, UNIQUE (job_id, step));
INSERT INTO "job_checkpoints" VALUES('ada','job_id',1,'2025-01-31T12:00:00.000000+00:00');
CREATE TABLE job_events (
            id INTEGER PRIMARY KEY,
            created_at TEXT NOT NULL,
            job_id TEXT NOT NULL,
            level TEXT NOT NULL,
            message TEXT NOT NULL,
            step INTEGER,
            data TEXT NOT NULL
        );
INSERT INTO "job_events" VALUES(1,'2025-01-31T12:00:00.000000+00:00','job_id','level','message',1,'data');
CREATE TABLE jobs (
            id TEXT PRIMARY KEY,
            created_at TEXT NOT NULL,
            owner TEXT NOT NULL,
            base TEXT NOT NULL,
            model TEXT NOT NULL,
            parent TEXT NOT NULL,
            adapter TEXT NOT NULL,
            method TEXT NOT NULL,
            hyperparameters TEXT NOT NULL,
            seed INTEGER NOT NULL,
            training_file TEXT NOT NULL,
            metadata TEXT NOT NULL,
            status TEXT NOT NULL,
            examples INTEGER NOT NULL,
            paused INTEGER NOT NULL,
            trained_tokens INTEGER,
            finished_at TEXT,
            error_code TEXT,
            error TEXT,
            error_param TEXT,
            result_file TEXT
        , validation_file TEXT, paused_at INTEGER, other_steps INTEGER NOT NULL DEFAULT 0);
INSERT INTO "jobs" VALUES('jobs-1','2025-01-31T12:00:00.000000+00:00','owner','base-a','model','parent','ada','method','hyperparameters',1,'training_file','metadata','status',1,1,1,'finished_at','error_code','error','error_param','result_file','validation_file',1,1);
CREATE TABLE leases (adapter TEXT PRIMARY KEY, node TEXT NOT NULL, epoch INTEGER NOT NULL);
INSERT INTO "leases" VALUES('ada','node',1);
CREATE TABLE migrations (name TEXT PRIMARY KEY, applied_at TEXT NOT NULL);
INSERT INTO "migrations" VALUES('m009_schema','2026-11-30T03:44:30.535268+00:00');
INSERT INTO "migrations" VALUES('m010_language','2026-11-30T03:44:30.542317+00:00');
INSERT INTO "migrations" VALUES('m011_application_runs','2026-11-30T03:44:30.542711+00:00');
INSERT INTO "migrations" VALUES('m012_counts','2026-11-30T03:44:30.543264+00:00');
INSERT INTO "migrations" VALUES('m013_jobs','2026-11-30T03:44:30.543791+00:00');
INSERT INTO "migrations" VALUES('m014_validation','2026-11-30T03:44:30.544743+00:00');
INSERT INTO "migrations" VALUES('m015_checkpoints','2026-11-30T03:44:30.544901+00:00');
INSERT INTO "migrations" VALUES('m016_users','2026-11-30T03:44:30.545069+00:00');
INSERT INTO "migrations" VALUES('m017_accounts','2026-11-30T03:44:30.545288+00:00');
INSERT INTO "migrations" VALUES('m018_shared_adapters','2026-11-30T03:44:30.552058+00:00');
INSERT INTO "migrations" VALUES('m019_preferences','2026-11-30T03:44:30.553427+00:00');
INSERT INTO "migrations" VALUES('m020_leases','2026-11-30T03:44:30.554920+00:00');
INSERT INTO "migrations" VALUES('m021_tools','2026-11-30T03:44:30.557220+00:00');
INSERT INTO "migrations" VALUES('m022_request_ids','2026-11-30T03:44:30.557863+00:00');
INSERT INTO "migrations" VALUES('m023_federated','2026-11-30T03:44:30.558518+00:00');
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
, account TEXT, direct INTEGER NOT NULL DEFAULT 0, origin TEXT, handed_on INTEGER NOT NULL DEFAULT -1, template_arguments TEXT, chosen_beside TEXT, rejected_beside TEXT);
INSERT INTO "pairs" VALUES(1,'2025-01-31T12:00:00.000000+00:00','ada','signals-1','pair',1.5,'[{"role":"user","content":"Grüße 🙂"}]','prompt','prompt_key','chosen','rejected','[1,2]','[1,2]','[1,2]','completions-1',1,'completions-1',1,'trained',1,1,1.5,1.5,'base-b','note','account',1,'origin',1,'template_arguments','chosen_beside','rejected_beside');
CREATE TABLE preferences (
            adapter TEXT PRIMARY KEY,
            text TEXT NOT NULL,
            created_at TEXT NOT NULL,
            account TEXT,
            distilled REAL NOT NULL
        );
INSERT INTO "preferences" VALUES('ada','text','2025-01-31T12:00:00.000000+00:00','account',1.5);
CREATE TABLE quarantine (
    pair_id INTEGER PRIMARY KEY REFERENCES pairs (id) ON DELETE CASCADE,
    created_at TEXT NOT NULL,
    adapter TEXT NOT NULL,
    reason TEXT NOT NULL,
    decision TEXT CHECK (decision IN ('released', 'dropped')),
    decided_at TEXT
);
INSERT INTO "quarantine" VALUES(1,'2025-01-31T12:00:00.000000+00:00','ada','reason','released','decided_at');
CREATE TABLE queued_pairs (adapter TEXT PRIMARY KEY, pairs INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO "queued_pairs" VALUES('ada',1);
CREATE TABLE served_base (fingerprint TEXT NOT NULL);
INSERT INTO "served_base" VALUES('base-b');
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
    kl_nats REAL, chosen_tokens INTEGER, rejected_tokens INTEGER,
    PRIMARY KEY (base, id)
);
INSERT INTO "shelved_metrics" VALUES('base-a',1,'2025-01-31T12:00:00.000000+00:00','ada',1,1,'held_out',1.5,1.5,1.5,1.5,1,1.5,1.5,1,1.5,1.5,1,1);
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
INSERT INTO "shelved_progress" VALUES('base-a',1,'trained',1,1,1.5,1.5,'base-b','note');
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
INSERT INTO "shelved_steps" VALUES('base-a',1,'2025-01-31T12:00:00.000000+00:00','ada',1,'[1,2]','reason');
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
    on_disk INTEGER NOT NULL, restored INTEGER, step_scale REAL NOT NULL DEFAULT 1.0, neutral_nll REAL, neutral_base_nll REAL, tested_at TEXT, problem TEXT, answer TEXT, own_kl_nats REAL,
    PRIMARY KEY (base, adapter, version)
);
INSERT INTO "shelved_versions" VALUES('base-a','ada',1,'2025-01-31T12:00:00.000000+00:00',1,'reason',1,1.5,1.5,1.5,'/var/lib/edged/adapters/base-b/ada/v000001',1,1,1.5,1.5,1.5,'tested_at','problem','answer',1.5);
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
, account TEXT);
INSERT INTO "signals" VALUES('signals-1','2025-01-31T12:00:00.000000+00:00','completions-1',1,'ada','signal','text',1.5,'[1,2]','reason','account');
CREATE TABLE skipped_steps (
    id INTEGER PRIMARY KEY,
    created_at TEXT NOT NULL,
    adapter TEXT NOT NULL,
    version INTEGER NOT NULL,
    pair_ids TEXT NOT NULL,
    reason TEXT NOT NULL
);
INSERT INTO "skipped_steps" VALUES(1,'2025-01-31T12:00:00.000000+00:00','ada',1,'[1,2]','reason');
CREATE TABLE struck_beliefs (adapter TEXT NOT NULL, key TEXT NOT NULL, created_at TEXT NOT NULL, PRIMARY KEY (adapter, key));
INSERT INTO "struck_beliefs" VALUES('ada','key','2025-01-31T12:00:00.000000+00:00');
CREATE INDEX completions_by_prompt ON completions (prompt_key);
CREATE INDEX signals_by_completion ON signals (completion_id, choice);
CREATE INDEX pairs_by_adapter ON pairs (adapter, state);
CREATE INDEX pairs_by_signal ON pairs (signal_id);
CREATE INDEX pairs_by_prompt ON pairs (prompt_key);
CREATE INDEX pairs_by_chosen ON pairs (chosen_completion_id);
CREATE INDEX pairs_by_rejected ON pairs (rejected_completion_id);
CREATE INDEX metrics_by_adapter ON alignment_metrics (adapter, split, version);
CREATE INDEX metrics_by_pair ON alignment_metrics (pair_id);
CREATE INDEX shelved_metrics_by_pair ON shelved_metrics (pair_id);
CREATE INDEX shelved_progress_by_pair ON shelved_progress (pair_id);
CREATE INDEX quarantine_by_adapter ON quarantine (adapter, decision);
CREATE INDEX completions_by_adapter ON completions (adapter, created_at);
CREATE INDEX application_runs_by_type ON application_runs (application, id);
CREATE TRIGGER pairs_inserted AFTER INSERT ON pairs WHEN new.state = 'queued' BEGIN INSERT INTO queued_pairs VALUES (new.adapter, 1) ON CONFLICT (adapter) DO UPDATE SET pairs = pairs + 1; END;
CREATE TRIGGER pairs_queued AFTER UPDATE OF state ON pairs WHEN new.state = 'queued' AND old.state <> 'queued' BEGIN INSERT INTO queued_pairs VALUES (new.adapter, 1) ON CONFLICT (adapter) DO UPDATE SET pairs = pairs + 1; END;
CREATE TRIGGER pairs_taken AFTER UPDATE OF state ON pairs WHEN new.state <> 'queued' AND old.state = 'queued' BEGIN UPDATE queued_pairs SET pairs = pairs - 1 WHERE adapter = old.adapter;
               DELETE FROM queued_pairs WHERE adapter = old.adapter AND pairs = 0; END;
CREATE TRIGGER pairs_deleted AFTER DELETE ON pairs WHEN old.state = 'queued' BEGIN UPDATE queued_pairs SET pairs = pairs - 1 WHERE adapter = old.adapter;
               DELETE FROM queued_pairs WHERE adapter = old.adapter AND pairs = 0; END;
CREATE INDEX metrics_by_split ON alignment_metrics (adapter, split);
CREATE INDEX pairs_of_one_side ON pairs (adapter, trained_version) WHERE '' IN (chosen, rejected);
CREATE INDEX jobs_by_adapter ON jobs (adapter, status);
CREATE INDEX job_events_by_job ON job_events (job_id, id);
CREATE INDEX job_events_by_step ON job_events (job_id, step) WHERE step IS NOT NULL;
CREATE INDEX completions_by_user ON completions (user);
CREATE INDEX signals_by_user ON signals (user);
CREATE INDEX pairs_by_account ON pairs (account);
CREATE INDEX signals_by_account ON signals (account);
CREATE UNIQUE INDEX pairs_by_origin ON pairs (coalesce(origin, signal_id || '/' || id));
CREATE INDEX completions_by_request ON completions (request_id, adapter) WHERE request_id IS NOT NULL;
CREATE INDEX federated_ledger_by_user ON federated_ledger (user);
COMMIT;
