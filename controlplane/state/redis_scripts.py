"""Lua scripts of the state store; Redis runs each as one atomic step. `redis.py` describes the keys.

Scripts are not rolled back. So everything that can fail (a stale key or one of the wrong type, an invalid
revision) comes before the first write.
"""

from __future__ import annotations

# KEYS: the revision, the log, the changes, the lease, then one hash per kind. ARGV: holder ("" for no lease)
# and epoch, the size of an epoch of revisions, how many changes are kept; then five per write: the hash's
# place in KEYS, the key, the expected version ("" for any), "1" to set, "0" to delete or "2" to require the
# value, and the value.
# Answers {1, 0, revision}, {0, number of the stale write, its version} or {-1, 0, 0} when fenced.
COMMIT = """
if ARGV[1] ~= '' then
  local held = redis.call('HMGET', KEYS[4], 'holder', 'epoch')
  if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then
    return {-1, 0, '0'}
  end
end
for i = 5, #ARGV, 5 do
  local stored = redis.call('HGET', KEYS[tonumber(ARGV[i])], ARGV[i + 1])
  local version = stored and string.match(stored, '^(%d+):') or '0'
  if ARGV[i + 2] ~= '' and ARGV[i + 2] ~= version then
    return {0, (i - 5) / 5, version}
  end
  if ARGV[i + 3] == '2' and (not stored or string.match(stored, '^%d+:(.*)$') ~= ARGV[i + 4]) then
    return {0, (i - 5) / 5, version}
  end
end
local before = redis.call('GET', KEYS[1]) or '0'
local log = redis.call('HMGET', KEYS[2], 'complete', 'server')
local info = redis.pcall('INFO', 'replication')
local server = type(info) == 'string' and string.match(info, 'master_replid:(%x+)') or ''
redis.call('ZCARD', KEYS[3])  -- fails here, if at all
local count = redis.call('INCR', KEYS[1])
if log[2] and log[2] ~= server then
  local size = tonumber(ARGV[3])
  count = redis.call('INCRBY', KEYS[1], size - count % size)
  before = string.format('%.0f', count - 1)
end
local revision = string.format('%.0f', count)
if log[1] ~= before then
  redis.call('DEL', KEYS[3])
  redis.call('HSET', KEYS[2], 'from', before)
end
redis.call('HSET', KEYS[2], 'complete', revision, 'server', server)
if server == '' then  -- INFO is forbidden: after a failover, unseen, a revision may be another's
  redis.call('HDEL', KEYS[2], 'complete')
end
for i = 5, #ARGV, 5 do
  local hash = KEYS[tonumber(ARGV[i])]
  if ARGV[i + 3] == '1' then
    redis.call('HSET', hash, ARGV[i + 1], revision .. ':' .. ARGV[i + 4])
  elseif ARGV[i + 3] == '0' then
    redis.call('HDEL', hash, ARGV[i + 1])
  end
  if ARGV[i + 3] ~= '2' then
    redis.call('ZADD', KEYS[3], revision, string.match(hash, ':entries:(.*)$') .. ':' .. ARGV[i + 1])
  end
end
local surplus = redis.call('ZCARD', KEYS[3]) - tonumber(ARGV[4])
if surplus > 0 then
  local last = redis.call('ZRANGE', KEYS[3], surplus - 1, surplus - 1, 'WITHSCORES')[2]
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', last)
  redis.call('HSET', KEYS[2], 'from', last)
end
return {1, 0, revision}
"""

# KEYS: the revision, then one hash per kind. Answers the revision and each hash.
SNAPSHOT = """
local found = {redis.call('GET', KEYS[1]) or '0'}
for i = 2, #KEYS do
  found[i] = redis.call('HGETALL', KEYS[i])
end
return found
"""

# KEYS: the revision, the log, the changes, then one hash per kind. ARGV: since, the kinds. Answers nil if the
# changes are unknown, else the revision, and for each change "KIND:KEY" and the stored text ("" for nothing).
CHANGES = """
local revision = redis.call('GET', KEYS[1]) or '0'
if revision == ARGV[1] then
  return {revision}
end
local log = redis.call('HMGET', KEYS[2], 'complete', 'from')
local since = tonumber(ARGV[1])
if log[1] ~= revision or since < tonumber(log[2]) or since > tonumber(revision) then
  return false
end
local hashes = {}
for i = 2, #ARGV do
  hashes[ARGV[i]] = KEYS[i + 2]
end
local found = {revision}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], '+inf')) do
  local kind, key = string.match(name, '^(.-):(.*)$')
  if hashes[kind] then
    found[#found + 1] = name
    found[#found + 1] = redis.call('HGET', hashes[kind], key) or ''
  end
end
return found
"""

# KEYS: the lease. ARGV: holder, milliseconds, the holder known to be gone. Answers holder and epoch. The
# epoch also grows with the clock, because a failover may have lost the last holder.
TAKE_LEASE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HMGET', KEYS[1], 'holder', 'epoch', 'until')
local other = held[1] and held[1] ~= '' and held[1] ~= ARGV[1] and held[1] ~= ARGV[3]
if other and tonumber(held[3]) > now then
  return {held[1], held[2]}
end
local epoch = held[2]
if held[1] ~= ARGV[1] then
  epoch = string.format('%.0f', math.max(now, tonumber(held[2] or '0') + 1))
end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', epoch, 'until', string.format('%.0f', now + ARGV[2]))
return {ARGV[1], epoch}
"""

# KEYS: the lease. ARGV: holder, epoch.
RELEASE_LEASE = """
local held = redis.call('HMGET', KEYS[1], 'holder', 'epoch')
if held[1] == ARGV[1] and held[2] == ARGV[2] then
  redis.call('HSET', KEYS[1], 'holder', '')
end
return 1
"""
