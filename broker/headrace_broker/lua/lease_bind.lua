-- Binds a request id that the scripts could not read to the owner's message. KEYS: the lease keys. ARGV: owner, id,
-- request id. Returns 1, or 0 where that id is another message's, or the lease was no longer the owner's.
local owner, id, request = ARGV[1], ARGV[2], ARGV[3]
if not owned_list(id, owner) then return 0 end
local holder = holder_of(request)
if holder then return holder == id and 1 or 0 end
local record = record_of(id)
if record then -- else somebody has deleted keys by hand
  unbind(id, record)
  record.request = request
  keep(id, record)
end
redis.call('HSET', REQUESTS, request, id)
return 1
