BEGIN TRANSACTION;
CREATE TABLE privtune_budgets (
	name VARCHAR(100) NOT NULL, 
	entries INTEGER NOT NULL, 
	charges INTEGER NOT NULL, 
	head VARCHAR(64) NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "privtune_budgets" VALUES('clinic',8,3,'7cbe37e6f040ef11c2399b5eb5e5020cf6bd7dfba93424e3f5f5691f8bec7262');
INSERT INTO "privtune_budgets" VALUES('mlflow',4,1,'e15ac4d57b4d09fbc44bdaea3a158536fe1e27185d76b78e9aaf038aadad5a9e');
CREATE TABLE privtune_entries (
	budget VARCHAR(100) NOT NULL, 
	seq INTEGER NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	charge INTEGER NOT NULL, 
	body TEXT NOT NULL, 
	sealed TEXT NOT NULL, 
	previous VARCHAR(64) NOT NULL, 
	hash VARCHAR(64) NOT NULL, 
	CONSTRAINT privtune_entries_pk PRIMARY KEY (budget, seq), 
	CONSTRAINT privtune_entries_seq CHECK (seq > 0), 
	FOREIGN KEY(budget) REFERENCES privtune_budgets (name)
);
INSERT INTO "privtune_entries" VALUES('clinic',1,'created',0,'{"created_at":"2026-11-22T05:04:33.634301+00:00","terms":{"adjacency":"add-remove","admission":"adaptive","dataset":"the clinic''s records","delta":1e-05,"epsilon":4.0,"name":"clinic","order":6.2,"unit":"record"}}','{"at":"2026-11-22T05:04:33.634301+00:00","salt":"56467036824a4832ca93e4b382e5fcdb","worker":"clinic:13778"}','0000000000000000000000000000000000000000000000000000000000000000','15c9021c60dcee53ee7d728d8b1242af1aea3d9a9da0768f17887d4b19af73a5');
INSERT INTO "privtune_entries" VALUES('clinic',2,'reserved',1,'{"arm":"a","basis":"declared","event":{"noise_multiplier":4.0,"type":"gaussian"},"note":"one","plan_digest":"","study":"s"}','{"at":"2026-11-22T05:04:33.638072+00:00","salt":"a5b783544326b9ed5e041324729f4aff","worker":"clinic:13778"}','15c9021c60dcee53ee7d728d8b1242af1aea3d9a9da0768f17887d4b19af73a5','24b8a071475cbda585dfaecad6f6248722205bd410f25ead0c2849d5d85eeb61');
INSERT INTO "privtune_entries" VALUES('clinic',3,'reserved',2,'{"arm":"b","basis":"declared","event":{"noise_multiplier":5.0,"type":"gaussian"},"note":"","plan_digest":"","study":"s"}','{"at":"2026-11-22T05:04:33.638072+00:00","salt":"01887dd99ae2154d3cb6bb1bfbb716db","worker":"clinic:13778"}','24b8a071475cbda585dfaecad6f6248722205bd410f25ead0c2849d5d85eeb61','1e09a04e66dc54ddbf52310a6525cf2906410c34629eb7e643fe58b001756d8d');
INSERT INTO "privtune_entries" VALUES('clinic',4,'started',1,'{}','{"at":"2026-11-22T05:04:33.646780+00:00","salt":"9f849f073f37befa127ebd72cc1c35a4","worker":"clinic:13778"}','1e09a04e66dc54ddbf52310a6525cf2906410c34629eb7e643fe58b001756d8d','c4c77fe9a59bf1215618d71c1e5eb843215370fcbfbbc98f69723ce94f70e63d');
INSERT INTO "privtune_entries" VALUES('clinic',5,'settled',1,'{}','{"at":"2026-11-22T05:04:33.676516+00:00","salt":"121a5d9b069e00f3c9cb1db2c848a9b3","transcript_digest":"feed","worker":"clinic:13778"}','c4c77fe9a59bf1215618d71c1e5eb843215370fcbfbbc98f69723ce94f70e63d','a4d2111b763c92e629506c8ca4cd5e6ed270a2af4224456dffd7f87b23f54af2');
INSERT INTO "privtune_entries" VALUES('clinic',6,'reserved',3,'{"arm":"","basis":"filter","event":{"noise_multiplier":9.0,"type":"gaussian"},"note":"h\u00e9lo","plan_digest":"","study":"","weight":[0.03827160493830988,0.0]}','{"at":"2026-11-22T05:04:33.730918+00:00","salt":"257284a5733ebc55cbd3b346c410c95f","worker":"clinic:13778"}','a4d2111b763c92e629506c8ca4cd5e6ed270a2af4224456dffd7f87b23f54af2','d172a5f78c23ed174931e40b3ddd82ea33abb45d33bdf30da956b5965ed32576');
INSERT INTO "privtune_entries" VALUES('clinic',7,'started',3,'{}','{"at":"2026-11-22T05:04:33.736874+00:00","salt":"cd74a85074631004606655569bc8f14d","worker":"clinic:13778"}','d172a5f78c23ed174931e40b3ddd82ea33abb45d33bdf30da956b5965ed32576','e7ab264caedcb315395cd2d5df4801c4fab02f3e9ecb7d6e3e25a9c237990a5e');
INSERT INTO "privtune_entries" VALUES('clinic',8,'settled',3,'{}','{"at":"2026-11-22T05:04:33.739654+00:00","salt":"ffe0e9cc6d1de355f6bdadae75b9fddf","transcript_digest":"","worker":"clinic:13778"}','e7ab264caedcb315395cd2d5df4801c4fab02f3e9ecb7d6e3e25a9c237990a5e','7cbe37e6f040ef11c2399b5eb5e5020cf6bd7dfba93424e3f5f5691f8bec7262');
INSERT INTO "privtune_entries" VALUES('mlflow',1,'created',0,'{"created_at":"2026-11-22T05:04:33.742599+00:00","terms":{"adjacency":"add-remove","admission":"adaptive","dataset":"","delta":1e-05,"epsilon":3.0,"name":"mlflow","order":7.6,"unit":"record"}}','{"at":"2026-11-22T05:04:33.742599+00:00","salt":"95f3fd8eba6b3b12d616ab577d2f3235","worker":"clinic:13778"}','0000000000000000000000000000000000000000000000000000000000000000','5cf6f1a9a9b10eeac56d4a43b41c80583d5e13a84cff261c5a5ca6df0c948d64');
INSERT INTO "privtune_entries" VALUES('mlflow',2,'reserved',1,'{"arm":"","basis":"recorded","event":{"noise_multiplier":0.3,"type":"gaussian"},"note":"half \ud83d of a pair","plan_digest":"","study":""}','{"at":"2026-11-22T05:04:33.745147+00:00","salt":"fcd1638ca0c87fa265fe2b7e18f64d6f","worker":"clinic:13778"}','5cf6f1a9a9b10eeac56d4a43b41c80583d5e13a84cff261c5a5ca6df0c948d64','d38e71907cac8069599152fa92e064bae4d672a855b5b917929a99f9e4c5fa63');
INSERT INTO "privtune_entries" VALUES('mlflow',3,'started',1,'{}','{"at":"2026-11-22T05:04:33.745147+00:00","salt":"dcec389407354192947761b73da83c9b","worker":"clinic:13778"}','d38e71907cac8069599152fa92e064bae4d672a855b5b917929a99f9e4c5fa63','17252caa74603bb43fc3d78702393df53d6884279fb658da4665a9e19b8647ee');
INSERT INTO "privtune_entries" VALUES('mlflow',4,'settled',1,'{}','{"at":"2026-11-22T05:04:33.745147+00:00","salt":"dde9e08ee424c89e13e095969db74d4f","worker":"clinic:13778"}','17252caa74603bb43fc3d78702393df53d6884279fb658da4665a9e19b8647ee','e15ac4d57b4d09fbc44bdaea3a158536fe1e27185d76b78e9aaf038aadad5a9e');
CREATE TABLE privtune_rounds (
	budget VARCHAR(100) NOT NULL, 
	charge INTEGER NOT NULL, 
	tasks INTEGER NOT NULL, 
	secret VARCHAR(64) NOT NULL, 
	CONSTRAINT privtune_rounds_pk PRIMARY KEY (budget, charge), 
	FOREIGN KEY(budget) REFERENCES privtune_budgets (name)
);
INSERT INTO "privtune_rounds" VALUES('clinic',1,2,'efeb9a7bcf6859bcabb7cb35304c794cf5d7c2c42d7d27d689abb08e036076b5');
CREATE TABLE privtune_schema (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT privtune_schema_pkc PRIMARY KEY (version_num)
);
INSERT INTO "privtune_schema" VALUES('0002');
CREATE TABLE privtune_tasks (
	budget VARCHAR(100) NOT NULL, 
	charge INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	attempts INTEGER NOT NULL, 
	worker VARCHAR(200) NOT NULL, 
	leased_until DOUBLE NOT NULL, 
	done INTEGER NOT NULL, 
	score DOUBLE, 
	result TEXT, 
	CONSTRAINT privtune_tasks_pk PRIMARY KEY (budget, charge, number), 
	FOREIGN KEY(budget, charge) REFERENCES privtune_rounds (budget, charge), 
	CONSTRAINT privtune_tasks_done CHECK (done IN (0, 1))
);
INSERT INTO "privtune_tasks" VALUES('clinic',1,0,1,'w',1.79532417365449380869e+09,1,0.5,'{"file":"x"}');
INSERT INTO "privtune_tasks" VALUES('clinic',1,1,1,'w',1.79532417366881585116e+09,1,0.25,'{"file":"x"}');
CREATE TRIGGER privtune_entries_no_UPDATE BEFORE UPDATE ON privtune_entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER privtune_entries_no_DELETE BEFORE DELETE ON privtune_entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
COMMIT;
