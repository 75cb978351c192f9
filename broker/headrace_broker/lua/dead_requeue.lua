-- Returns one dead letter to its queue, and deletes the keys of its first run.
-- KEYS: QUEUE, LIST, STREAM, ENDED, RESULT, ENGINE_LOSSES, LISTENER
-- ARGV: letter, body, request, content, is_check
-- letter: as stored. request: its request id or ''. content: the digest of the message's content. is_check: 1 to write
-- nothing.
-- Result: 1, or 0 if nothing was done. That is so if the letter is no longer stored, if its message waits or is leased,
-- or if its request id or its stream belongs to another message: that stream must not be deleted.
local list = redis.call('TYPE', LIST).ok
if list ~= 'list' and list ~= 'none' then
  return {err = string.format('WRONGTYPE the list %s holds a %s: restore or delete it', (string.gsub(LIST, '%c+', ' ')), list)}
end
if redis.call('HEXISTS', LEASE_BODIES, lease_id_of(body, QUEUE)) == 1 then return 0 end
local holder = redis.call('HGET', LEASE_REQUESTS, request)
if holder and redis.call('HEXISTS', LEASE_BODIES, holder) == 1 then return 0 end
if redis.call('TYPE', STREAM).ok == 'stream' and is_of_another(STREAM, content) then return 0 end
-- Redis does not undo the removal of the letter if a later write is refused, so rights are checked before it.
local may_requeue = redis.acl_check_cmd('DEL', STREAM, ENDED, RESULT, ENGINE_LOSSES, LISTENER)
  and redis.acl_check_cmd('LPUSH', LIST, body)
if not may_requeue then return {err = 'NOPERM the user may not run DEL or LPUSH on the keys of the dead letter'} end
if is_check == '1' then return 1 end
if redis.call('LREM', DEAD_LETTERS, 1, letter) == 0 then return 0 end
redis.call('DEL', STREAM, ENDED, RESULT, ENGINE_LOSSES, LISTENER)
redis.call('LPUSH', LIST, body)
return 1
